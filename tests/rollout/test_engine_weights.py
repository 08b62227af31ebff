"""New weights reach a running engine at once, whole, and are written on the tokens they made."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from baton.errors import EngineFault
from baton.types import FinishReason, PolicyVersion

pytestmark = pytest.mark.numerics

PROMPT = [5, 6, 7, 8, 9, 10]
V1 = PolicyVersion("run", 1)


def tensors(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def greedy_across_a_swap(first, second, num_first: int, num_tokens: int):
    """Greedy ids and logprobs where the weights change after `num_first` tokens and the KV cache is kept."""
    cache, ids, logprobs, feed = DynamicCache(), [], [], PROMPT
    with torch.inference_mode():
        for i in range(num_tokens):
            model = first if i < num_first else second
            logits = model(torch.tensor([feed]), past_key_values=cache, use_cache=True).logits[0, -1]
            ids.append(int(logits.argmax()))
            logprobs.append(float(torch.log_softmax(logits, -1)[ids[-1]]))
            feed = [ids[-1]]
    return ids, logprobs


@pytest.mark.parametrize("num_first", [1, 5])
def test_new_weights_in_flight_split_the_segment_and_keep_the_cache(num_first, embedded, load, driver):
    engine, first, second = embedded("qwen3"), load("qwen3"), load("qwen3_next")
    grown = driver.run(
        engine,
        [driver.lease(0, PROMPT, 12, temperature=0.0, is_exact=False)],
        before_step=lambda step: engine.load_weights(tensors(second), V1) if step == num_first else None,
    )[0]
    ids, logprobs = greedy_across_a_swap(first, second, num_first, 12)
    assert grown.token_ids == ids
    assert grown.behavior_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert [(s.policy_version, len(s.token_ids)) for s in grown.segments] == [(0, num_first), (1, 12 - num_first)]
    assert engine.version == V1
    with torch.inference_mode():
        fresh = second(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    recomputed = fresh.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (recomputed - torch.tensor(logprobs))[num_first:].abs().max() > 1e-3, "a rebuilt cache must be told apart"


def test_kept_prefixes_are_dropped_with_the_weights_that_made_them(embedded, load, driver):
    """9 siblings, 8 slots: the ninth is prefilled again, under the new weights, and says what those say."""
    engine, second = embedded("qwen3"), load("qwen3_next")
    leases = [driver.lease(i, PROMPT, 4, group_id=0, sample_index=i, is_exact=False) for i in range(9)]
    swapped = driver.run(engine, leases, lambda step: engine.load_weights(tensors(second), V1) if step == 2 else None)
    assert engine.stats.prefilled_tokens == 2 * (len(PROMPT) - 1)
    fresh = embedded("qwen3_next")
    expected = driver.run(fresh, [driver.lease(8, PROMPT, 4, group_id=0, sample_index=8)])[8]
    assert swapped[8].token_ids == expected.token_ids
    assert swapped[8].behavior_logprobs == expected.behavior_logprobs
    assert swapped[8].policy_versions == [1] * 4


def test_tied_weights_may_come_under_one_name_or_both_and_in_another_dtype(embedded, load, driver):
    second = load("qwen3_next")
    expected = driver.run(embedded("qwen3_next"), [driver.lease(0, PROMPT, 8)])[0]
    only_head = {("lm_head.weight" if "embed" in n else n): t for n, t in tensors(second).items()}
    for given in (tensors(second), only_head, dict(second.state_dict()), tensors(second.double())):
        engine = embedded("qwen3")
        engine.load_weights(given, PolicyVersion("run", 0))
        assert driver.run(engine, [driver.lease(0, PROMPT, 8)])[0].behavior_logprobs == expected.behavior_logprobs


@pytest.mark.parametrize("fault", ["missing", "unexpected", "wrong shape"])
def test_tensors_that_do_not_fit_are_named_and_change_nothing(fault, embedded, load, driver):
    engine, given = embedded("qwen3"), tensors(load("qwen3_next"))
    expected = driver.run(engine, [driver.lease(0, PROMPT, 8)])[0]
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del given[name]
    elif fault == "unexpected":
        name = "model.layers.9.mlp.up_proj.weight"
        given[name] = torch.zeros(2)
    else:
        given[name] = given[name][:-1]
    with pytest.raises(EngineFault, match=f"{fault}.*{name}"):
        engine.load_weights(given, V1)
    assert engine.version.number == 0
    assert driver.run(engine, [driver.lease(0, PROMPT, 8)])[0].behavior_logprobs == expected.behavior_logprobs


def test_the_engine_copies_the_tensors_it_is_given(embedded, load, driver):
    """The trainer goes on training the tensors it published; the engine must not feel it."""
    engine, given = embedded("qwen3"), {n: t.clone() for n, t in tensors(load("qwen3_next")).items()}
    engine.load_weights(given, PolicyVersion("run", 0))
    before = driver.run(engine, [driver.lease(0, PROMPT, 8)])[0]
    for tensor in given.values():
        tensor.zero_()
    after = driver.run(engine, [driver.lease(0, PROMPT, 8)])[0]
    assert (after.token_ids, after.finish_reason) == (before.token_ids, FinishReason.LENGTH)
    assert after.behavior_logprobs == before.behavior_logprobs


def test_logits_that_are_not_finite_name_the_trajectory(embedded, load, driver):
    engine, given = embedded("llama"), tensors(load("llama"))
    given["lm_head.weight"] = given["lm_head.weight"].clone()
    given["lm_head.weight"][3] = float("nan")
    engine.submit(driver.lease(21, PROMPT, 8, group_id=4, sample_index=2, is_exact=False))
    engine.step()
    engine.load_weights(given, V1)
    with pytest.raises(EngineFault, match=r"trajectory 4/2 \(lease 21\): the logits of token 1 under policy version 1"):
        engine.step()
