"""Sleep, wake and load in the scheduler of a real vLLM. The sleep of its CPU build frees no memory, so these tests show
only that the calls leave a vLLM that serves the loaded weights. `tests/rollout/test_vllm_sleep_order.py` tests the
order."""

from __future__ import annotations

import pytest
from engine_contract import PROMPT
from test_vllm_exact import assert_logprobs_are_those_of
from test_vllm_runs import EAGER, assert_trained_on_its_own_tokens, baton, end, written

from baton.policy.tensors import policy_tensors
from baton.records.metrics import read_metrics
from baton.types import PolicyVersion


def test_a_vllm_that_slept_serves_what_it_loads_and_finds_no_prefix_of_before(vllm, load, driver):
    engine = vllm("qwen3")
    for number, name in ((1, "qwen3_next"), (2, "qwen3")):
        engine.sleep()
        engine.sleep()
        engine.wake_up()
        engine.load_weights(policy_tensors(load(name)), PolicyVersion("run", number))
        lease = driver.lease(number, PROMPT, 16, version=number, temperature=0.0)
        grown = driver.run(engine, [lease])[number]
        assert grown.policy_versions == [number] * 16
        assert_logprobs_are_those_of(load(name), PROMPT, grown)
    assert engine.held_bytes == 0, "a CPU has no device memory"


@pytest.mark.parametrize(
    ("transport", "lora", "own", "ranks"),
    [("store", False, {}, 1), ("direct", False, {}, 1), ("store", True, {"lora_rank": 4}, 1), ("store", False, {}, 2)],
    ids=["files", "direct", "an adapter that vLLM applies", "ranks"],
)
def test_a_run_whose_trainer_and_vllm_take_turns(transport, lora, own, ranks, tmp_path):
    """In sync every token is of the version that is trained: the probabilities tell stale weights at once."""
    changes = {"engine__kind": "vllm", "engine__vllm": {**EAGER, **own}, "weights__transport": transport}
    recipe = written(
        tmp_path,
        **changes,
        rollout__placement="colocated",
        trainer__ranks=ranks,
        **({"lora__rank": 4, "lora__alpha": 8} if lora else {}),
    )
    log = tmp_path / "log"
    end(baton(log, "train", str(recipe)), log)
    assert "vLLM's sleep mode " in log.read_text()
    assert_trained_on_its_own_tokens(tmp_path)
    rows = [row for row in read_metrics(tmp_path / "r") if "policy/loss" in row]
    assert all(row["time/turns"] > 0 and row["memory/trainer_bytes"] > 0 for row in rows)
