"""A generative reward model whose server Baton starts: the server's death or silence costs no reward.

A small HTTP server (`tests/fake_vllm`) is in the place of vLLM. `tests/vllm_contract/test_vllm_rewards.py` uses vLLM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judging_cases import PROMPT, SomeTask, children, is_running, trajectory, wait_until

from baton.errors import UserError
from baton.policy.reward_model import check_generative_model
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.rewards.pool import BusyTime
from baton.rewards.scorer import RewardScorer
from baton.rewards.settings import JudgeSettings, RewardSettings
from baton.run.dry_run import check_reward_models
from baton.run.memory import processes_of
from baton.specs.model import paged_cache_bytes, read_model
from baton.types import FailureCause
from tests.reward_models import make_reward_model, servers

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
FAKE = Path(__file__).parents[1] / "fake_vllm"
KEYS: dict[str, Any] = {
    "kind": "model",
    "template": "Rate {response}",
    "pattern": r"Rating: (\d+)",
    "devices": ("cpu",),
    "max_new_tokens": 16,
    "context_tokens": 300,
    "concurrency": 4,
}


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]))
    before = children()
    yield
    assert wait_until(lambda: children() <= before and not servers()), "processes are left"


def scorer_of(small: Any, **keys: Any) -> RewardScorer:
    reward = RewardSettings(**{**KEYS, "model": str(small.model), **keys})
    return RewardScorer({"some": SomeTask()}, [reward], {}, JudgeSettings(retries=2))  # type: ignore[dict-item]


def test_the_number_in_the_reply_is_the_reward(small: Any) -> None:
    with scorer_of(small) as scorer:
        scorer.start()
        found = [scorer.score(PROMPT, response) for response in ("", "four", "arguments")]
    assert [one.reward for one in found] == [5.0, 9.0, 1.0]  # of the fake server; the last checks its arguments
    assert found[0].parts == {"model": 5.0}


def test_a_reply_that_is_too_long_or_refused_gives_no_reward(small: Any) -> None:
    with scorer_of(small) as scorer:
        long, busy = scorer.score(PROMPT, "flood"), scorer.score(PROMPT, "busy")
        assert scorer.score(PROMPT, "four").reward == 9.0
    assert (long.cause, long.reward) == (FailureCause.MALFORMED, 0.0)
    assert "more than 4,194,304 bytes" in (long.failure or "")
    assert busy.cause is FailureCause.CRASHED
    assert not long.is_judged
    assert not busy.is_judged


def test_the_busy_time_is_the_share_of_used_slots() -> None:
    now = [0.0]
    one, four = BusyTime(1, lambda: now[0]), BusyTime(4, lambda: now[0])
    for each in (one, four):
        each.change(2)
    now[0] = 10.0  # both calls wait for the one slot, or use two of four
    for each in (one, four):
        each.change(-1)
    now[0] = 12.0
    assert (one.take(), four.take()) == (12.0, 5.5)
    for each in (one, four):
        each.change(-1)
    now[0] = 20.0
    assert (one.take(), four.take()) == (0.0, 0.0)


def test_a_scorer_reports_the_busy_time_of_its_models(small: Any) -> None:
    with scorer_of(small) as scorer:
        assert scorer.metrics() == {}, "it has not started"
        scorer.start()
        scorer.score(PROMPT, "four")
        assert scorer.metrics()["time/reward_model_busy"] > 0
        assert scorer.metrics()["time/reward_model_busy"] == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_server_that_is_killed_or_stopped_is_started_again_and_its_call_repeated(
    how: signal.Signals, small: Any
) -> None:
    with scorer_of(small) as scorer:
        scorer.start()
        first = scorer.score(PROMPT, "four")
        (server,) = servers()
        os.kill(server, signal.SIGSTOP)
        scorer.submit([trajectory(1, 0)], PROMPT, ["four"])
        os.kill(server, how)
        (second,) = scorer.drain()
        assert second.judgement == first
        assert wait_until(lambda: not is_running(server))
        assert len(servers() - {server}) == 1


def test_a_server_that_does_not_start_ends_the_run_with_its_last_output(small: Any) -> None:
    with scorer_of(small, arguments={"seed": 3}) as scorer, pytest.raises(UserError) as error:
        scorer.start()
    assert "its vLLM server ended with exit code 1; its last output: no kernel image is available" in str(error.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"arguments": {"port": 1}},
            "port: Baton sets this argument of vLLM; remove it: Baton starts the server on 127",
        ),
        ({"arguments": {"hos": "0.0.0.0"}}, "hos: Baton sets this argument"),
        ({"arguments": {"no_trust_remote_code": False}}, "it can execute code .* remove it"),
        ({"arguments": {"max_num_seqs": 3}}, "use concurrency"),
        ({"arguments": {"x --host": 1}}, "allowed is the name of an argument of vLLM"),
        ({"max_new_tokens": 300}, "context_tokens must be larger"),
        ({"batch_tokens": 5}, 'batch_tokens belongs to kind = "model" without template'),
        ({"template": "", "arguments": {"seed": 1}}, "context_tokens belongs to"),
        ({"kind": "http", "url": "http://x", "devices": ()}, 'context_tokens belongs to kind = "model" with template'),
    ],
)
def test_keys_that_contradict_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardSettings(**{**KEYS, "model": "m", **keys})


def test_the_dry_run_checks_model_context_and_memory(tmp_path: Path, small: Any) -> None:
    with pytest.raises(UserError, match="ForSequenceClassification, but a reward model with template is a generative"):
        check_generative_model(str(make_reward_model(tmp_path / "classifier", small.model)))

    def recipe(context: int) -> Recipe:
        file = tmp_path / "recipe.toml"
        own = f'[[reward]]\nkind = "model"\nmodel = "{small.model}"\ntemplate = "{{response}}"\ndevices = ["cpu"]\n'
        own += f"context_tokens = {context}\nmax_new_tokens = 9\nconcurrency = 4\n"
        file.write_text(small.recipe.read_text().replace("[[reward]]", own + "\n[[reward]]", 1))
        return load_recipe(Recipe, file, [f"run.directory={tmp_path}"])

    with pytest.raises(UserError, match=r"context_tokens: got 999999, but .* reads at most"):
        check_reward_models(recipe(999_999))
    check_reward_models(recipe(128))
    model = read_model(Path(small.model))
    found = next(p for p in processes_of(recipe(128), model, on_cpu=True) if "reward model" in p.name)
    parts = {part.name: part.num_bytes for part in found.parts}
    assert parts["KV cache"] == paged_cache_bytes(model, 4, 128, 4)
    assert parts["weights"] == 4 * model.params
    # two blocks of 128 positions for each of four sequences, and 16 MiB
    assert parts["KV cache"] == 4 * 2 * 128 * model.kv_values_per_token * model.num_layers * 4 + 2**24
