"""A reward model: its scores are those of transformers, and a process that dies or hangs costs no reward."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from judging_cases import PROMPT, SomeTask, children, hand_clock, is_running, trajectory, wait_until
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from baton.console import Console
from baton.errors import UserError
from baton.policy.reward_model import RewardModel
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.metrics import read_metrics
from baton.rewards.scorer import RewardScorer
from baton.rewards.settings import JudgeSettings, RewardSettings
from baton.run.assemble import build_loop
from baton.run.devices import DeviceLayout
from baton.run.dry_run import check_reward_models, trainer_bytes
from baton.run.memory import processes_of
from baton.specs.model import read_model
from baton.types import Episode, Exchange, FailureCause, Message, Prompt, RewardResult, ScoredTrajectory
from baton.views.terminal.progress import TerminalObserver
from tests.reward_models import make_reward_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]
RESPONSES = ["2", "it is three, or so I think", "", "2 2 2 2 2 2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, small: Any) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model", small.model)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = children()
    yield
    assert wait_until(lambda: children() <= before), f"processes are left: {children() - before}"


def scorer_of(model: Path, **keys: Any) -> RewardScorer:
    reward = RewardSettings(kind="model", model=str(model), **{"devices": ("cpu",), **keys})
    return RewardScorer({"some": SomeTask()}, [reward], {}, JudgeSettings(retries=2))  # type: ignore[dict-item]


def of_transformers(model: Path, response: str) -> float:
    """The score of one conversation, as the documentation of transformers computes it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": response}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    inputs = tokenizer([text], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        return Qwen3ForSequenceClassification.from_pretrained(model)(**inputs).logits[0, 0].item()


def scores_of(scorer: RewardScorer, responses: list[str]) -> list[RewardResult]:
    for index, response in enumerate(responses):
        scorer.submit([trajectory(0, index)], PROMPT, [response])
    found = {one.trajectory.sample_index: one.judgement for one in scorer.drain()}
    return [found[index] for index in range(len(responses))]


def test_scores_are_those_of_transformers(model: Path) -> None:
    with scorer_of(model) as scorer:
        assert "namespaces" in scorer.start()
        found = scores_of(scorer, RESPONSES)
    expected = [of_transformers(model, response) for response in RESPONSES]
    assert [one.reward for one in found] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert len({one.reward for one in found}) == len(RESPONSES)
    assert found[0].parts == {"model": found[0].reward}


def test_a_score_does_not_depend_on_its_batch(model: Path) -> None:
    own = RewardModel(str(model), "cpu", "float32", 1024)
    sequences = [own.ids([*PROMPT.messages, Message("assistant", response)]) for response in RESPONSES]
    alone = [own.scores([ids])[0] for ids in sequences]
    assert own.scores(sequences) == pytest.approx(alone, rel=1e-4, abs=1e-4)
    assert own.batch_tokens == 0  # on a CPU a batch is one conversation, so the bits do not depend on others
    halves = RewardModel(str(model), "cpu", "bfloat16", 1024).scores(sequences)
    assert halves == pytest.approx(alone, rel=0.2, abs=0.2)
    assert halves != alone


def test_an_episode_is_scored_as_its_conversation(model: Path) -> None:
    turns = (Message("assistant", "1"), Message("user", "no"), Message("assistant", "2"))
    own = RewardModel(str(model), "cpu", "float32", 1024)
    (expected,) = own.scores([own.ids([*PROMPT.messages, *turns])])
    episode = Episode((Exchange(1, "1", 0.0, "no", "", 0.0), Exchange(2, "2", 1.0, "", "", 0.0)))
    of_environment = RewardResult(1.0, {"environment": 1.0}, True)
    with scorer_of(model) as scorer:
        scorer.submit([ScoredTrajectory(trajectory(0, 0), of_environment, episode)], PROMPT, [turns])
        (found,) = scorer.drain()
    assert found.judgement.reward == pytest.approx(1.0 + expected)


def scorer_pids(before: set[int]) -> set[int]:
    """The processes without children among the descendants of this process that were started after `before`."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = frontier = children() - before
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found = found | frontier
    return {pid for pid in found if pid not in parents.values()}


def test_a_killed_process_is_replaced_and_its_call_repeated(model: Path) -> None:
    before = children()
    with scorer_of(model) as scorer:
        scorer.start()
        (first,) = scores_of(scorer, ["2"])
        (pid,) = scorer_pids(before)
        os.kill(pid, signal.SIGSTOP)
        scorer.submit([trajectory(1, 0)], PROMPT, ["2"])
        os.kill(pid, signal.SIGKILL)
        (second,) = scorer.drain()
    assert second.judgement == first


def test_a_hung_process_is_killed_and_its_call_repeated(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, before = hand_clock(monkeypatch), children()
    with scorer_of(model) as scorer:
        scorer.start()
        (first,) = scores_of(scorer, ["2"])
        (pid,) = scorer_pids(before)
        os.kill(pid, signal.SIGSTOP)
        scorer.submit([trajectory(1, 0)], PROMPT, ["2"])
        assert scorer.collect(0.5) == []
        while is_running(pid):
            clock.advance(200.0)
            scorer.collect(0.1)
        found: list[ScoredTrajectory] = []
        while not found:  # the pause before the second attempt passes; its deadline does not
            clock.advance(0.01)
            found = scorer.collect(0.1)
    assert found[0].judgement == first


def test_a_conversation_that_is_too_long_has_no_reward(model: Path) -> None:
    with scorer_of(model) as scorer:
        found = scorer.score(PROMPT, "1" * 300)
    assert found.cause is FailureCause.MALFORMED
    assert "reads at most 256 tokens, but prompt and response have 30" in (found.failure or "")


def test_a_template_that_fails_for_a_conversation_gives_no_reward(tmp_path: Path, small: Any) -> None:
    model = make_reward_model(tmp_path / "model", small.model)
    template = (
        "{% for m in messages %}{{ raise_exception('no system') if m.role == 'system' else m.content }}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(template)
    with scorer_of(model) as scorer:
        found = scorer.score(Prompt("p", "some", (Message("system", "be brief"), *PROMPT.messages)), "2")
    assert found.cause is FailureCause.RAISED
    assert "no system" in (found.failure or "")


def refusal(model: Path, device: str = "cpu") -> str:
    with pytest.raises(UserError) as error:
        RewardModel(str(model), device, "float32", 1024)
    return str(error.value)


def test_unusable_models_are_refused_with_a_sentence(tmp_path: Path, small: Any, model: Path) -> None:
    three = make_reward_model(tmp_path / "three", small.model, labels=3)
    assert "with 3 labels, but a reward model has 1 label" in refusal(three)
    with scorer_of(three) as scorer, pytest.raises(UserError, match="with 3 labels, but a reward model has 1 label"):
        scorer.start()  # the sentence of the model's process
    assert "Qwen3ForCausalLM, allowed is a Hugging Face model for sequence classification" in refusal(small.model)
    bare = make_reward_model(tmp_path / "bare", small.model)
    (bare / "chat_template.jinja").unlink()
    assert "[[reward]] model: the tokenizer in" in refusal(bare)
    assert "has no chat template" in refusal(bare)
    headless = make_reward_model(tmp_path / "headless", small.model)
    config = (headless / "config.json").read_text()
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(headless)).save_pretrained(headless)
    (headless / "config.json").write_text(config)
    assert "lack score.weight" in refusal(headless)
    pickled = make_reward_model(tmp_path / "pickled", small.model)
    torch.save(Qwen3ForSequenceClassification.from_pretrained(pickled).state_dict(), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert "no reward model could be loaded" in refusal(pickled)
    assert "there is no directory" in refusal(tmp_path / "nothing")
    assert torch.cuda.is_available() or "[[reward]] devices: got 'cuda:0'" in refusal(model, "cuda:0")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kind": "model"}, 'model = "name" belongs to kind = "model"'),
        ({"kind": "correct", "model": "m"}, 'model = "name" belongs to kind = "model"'),
        ({"kind": "correct", "batch_tokens": 5}, 'batch_tokens belongs to kind = "model"'),
        ({"kind": "model", "model": "m", "devices": ("cpu", "cpu")}, "each process needs a device of its own"),
    ],
)
def test_keys_of_a_reward_model_belong_to_it(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardSettings(**keys)


def recipe_with(small: Any, model: Path, tmp_path: Path, *overrides: str, keys: str = "") -> Recipe:
    file = tmp_path / "recipe.toml"
    own = f'[[reward]]\nkind = "model"\nmodel = "{model}"\n{keys}\n'
    file.write_text(small.recipe.read_text().replace("[[reward]]", own + "\n[[reward]]", 1))
    return load_recipe(Recipe, file, [f"run.directory={tmp_path}", "run.steps=2", "eval.every=0", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [(), ("rollout.mode=async", "engine.processes=1"), ("rollout.placement=colocated",)]
)
def test_a_run_trains_with_a_reward_model(overrides: tuple[str, ...], small: Any, model: Path, tmp_path: Path) -> None:
    recipe = recipe_with(small, model, tmp_path, *overrides)
    loop = build_loop(recipe, TerminalObserver(Console(quiet=True), 2), resume=False, overwrite=False)
    try:
        loop.train()
    finally:
        loop.close()
    rows = [row for row in read_metrics(recipe.run.path) if "reward/mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["judge/failed"] == 0
        assert row["reward/model/mean"] != 0
        assert row["policy/grad_norm"] > 0


def test_a_context_that_the_reward_model_lacks_is_refused(small: Any, tmp_path: Path) -> None:
    short = make_reward_model(tmp_path / "short", small.model, positions=48)
    with pytest.raises(UserError, match=r"at most 48 tokens, but prompt and response may have engine.max_context"):
        check_reward_models(recipe_with(small, short, tmp_path))


def test_a_large_reward_model_with_the_name_of_the_trainer_is_not_counted_as_the_trainer(
    small: Any, tmp_path: Path
) -> None:
    large, layers = make_reward_model(tmp_path / "large", small.model), 5000
    file = large / "config.json"
    deeper = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    file.write_text(json.dumps(json.loads(file.read_text()) | deeper))
    recipes = [recipe_with(small, large, tmp_path, keys=keys) for keys in ("", 'name = "trainer"')]
    plain, named = (trainer_bytes(recipe, is_here=True) for recipe in recipes)
    assert named == plain


def test_the_memory_of_a_reward_model_is_counted_on_each_of_its_devices(
    small: Any, model: Path, tmp_path: Path
) -> None:
    recipe = recipe_with(small, model, tmp_path)
    policy = read_model(small.model)
    *_, on_cpu = processes_of(recipe, policy, on_cpu=True)
    weights, block = on_cpu.parts[:2]
    whole = Qwen3ForSequenceClassification.from_pretrained(model)
    params = sum(p.numel() for p in whole.parameters()) - whole.score.weight.numel()
    assert (on_cpu.name, on_cpu.count, weights.num_bytes) == ("the reward model 'model'", 1, 4 * params)
    assert block.num_bytes == 64 * (4 * (2 * 32 + 3 * 48) + 8 * 32)  # engine.max_context_tokens = 64
    layout = DeviceLayout((0,), ((1,),), (("model", ("cuda:2", "cuda:3")),))
    *_, on_gpus = processes_of(recipe, policy, on_cpu=False, layout=layout)
    assert (on_gpus.name, on_gpus.gpus) == ("each of 2 reward models 'model'", ((2,), (3,)))
    assert on_gpus.parts[0].num_bytes == 2 * params
    assert str(layout) == "trainer rank 0: 0; engine 0: 1; reward model model: cuda:2, cuda:3"
