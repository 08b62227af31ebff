"""vLLM and the embedded engine, in float32 on one model: the same ids and probabilities, as far as rounding allows."""

from __future__ import annotations

import random

import pytest
import torch
from engine_contract import PROMPT

from baton.policy.tensors import policy_tensors
from baton.types import PolicyVersion, Segment

CLOSE = 1e-3
"""Nats between the two best tokens, below which rounding may choose either."""
V1, V2 = PolicyVersion("run", 1), PolicyVersion("run", 2)


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(80) for _ in range(length)] for length in lengths]


def logits_of(model, prompt_ids, token_ids) -> torch.Tensor:
    """[L, V] behind each token, by one plain forward."""
    with torch.inference_mode():
        return model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1].float()


def assert_same_until_close(model, prompt, got, expected) -> int:
    """Greedy ids are equal up to where the two best tokens are hardly apart; return how many that is."""
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one != other:
            best = logits_of(model, prompt, expected)[i].topk(2).values
            assert best[0] - best[1] < CLOSE, f"token {i} differs, and the best two are {best[0] - best[1]:.4f} apart"
            return i
    return len(got)


def assert_logprobs_are_those_of(model, prompt, trajectory, temperature=1.0) -> None:
    logprobs = torch.log_softmax(logits_of(model, prompt, trajectory.token_ids) / temperature, -1)
    expected = logprobs.gather(1, torch.tensor(trajectory.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(trajectory.behavior_logprobs), expected, atol=2e-4, rtol=0)


RAGGED = (1, 2, 7, 31, 64, 66, 128, 129, 200, 257, 300, 5, 5, 12)


def test_greedy_ids_equal_the_embedded_engines(vllm, embedded, load, driver):
    model, given = load("qwen3"), prompts(RAGGED)
    leases = [driver.lease(i, p, 24, temperature=0.0) for i, p in enumerate(given)]
    got, expected = (driver.run(build(max_context_tokens=512), leases) for build in (vllm, embedded))
    equal = 0
    for i, prompt in enumerate(given):
        equal += assert_same_until_close(model, prompt, got[i].token_ids, expected[i].token_ids)
        assert_logprobs_are_those_of(model, prompt, got[i])
    assert equal > 0.9 * 24 * len(given), "most ids must be equal, not only the first"


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_at_the_sampling_temperature(temperature, vllm, load, driver):
    model, given = load("qwen3"), prompts([3, 40, 150], seed=2)
    leases = [driver.lease(i, p, 40, temperature=temperature) for i, p in enumerate(given)]
    for i, trajectory in driver.run(vllm(max_context_tokens=512), leases).items():
        assert_logprobs_are_those_of(model, given[i], trajectory, temperature)


def test_sampled_tokens_come_as_often_as_they_are_likely(vllm, load, driver):
    """400 draws of one token: within five standard deviations of the model's own probabilities."""
    model, prompt = load("qwen3"), PROMPT
    grown = driver.run(vllm(), [driver.lease(i, prompt, 1, group_id=0, sample_index=i) for i in range(400)])
    seen = torch.bincount(torch.tensor([t.token_ids[0] for t in grown.values()]), minlength=80) / 400
    expected = logits_of(model, prompt, [0])[0].softmax(-1)
    assert ((seen - expected).abs() <= 5 * (expected * (1 - expected) / 400).sqrt() + 1e-6).all()


def test_a_resume_from_ids_at_every_position_continues_with_the_same_ids(vllm, load, driver):
    prompt, length = prompts([23])[0], 24
    engine, model = vllm(), load("qwen3")
    whole = driver.run(engine, [driver.lease(0, prompt, length, temperature=0.0)])[0]
    resumed = [
        driver.lease(
            cut,
            prompt,
            length,
            segments=(Segment(tuple(whole.token_ids[:cut]), tuple(whole.behavior_logprobs[:cut]), 0),),
            temperature=0.0,
        )
        for cut in range(1, length)
    ]
    for trajectory in driver.run(engine, resumed).values():
        assert_same_until_close(model, prompt, trajectory.token_ids, whole.token_ids)
        assert trajectory.num_tokens == length
        assert_logprobs_are_those_of(model, prompt, trajectory)


def test_after_a_load_it_is_the_other_model_and_no_prefix_of_the_first_is_found(vllm, load, driver):
    """A prompt of 300 ids fills two blocks of the prefix cache, which the second group of the same version finds."""
    prompt = prompts([300], seed=4)[0]
    engine, models = vllm(max_context_tokens=512), {0: load("qwen3"), 1: load("qwen3_next"), 2: load("qwen3")}
    grown = {}
    for number, model in models.items():
        if number:
            engine.load_weights(policy_tensors(model), PolicyVersion("run", number))
        for again in range(2):
            before = engine.stats.prefilled_tokens
            lease = driver.lease(10 * number + again, prompt, 24, version=number, temperature=0.0)
            grown[number, again] = driver.run(engine, [lease])[lease.lease_id]
            assert engine.stats.prefilled_tokens - before == (300 if not again else 44), "256 are found again"
            assert grown[number, again].policy_versions == [number] * 24
            assert_logprobs_are_those_of(model, prompt, grown[number, again])
    assert grown[0, 0].token_ids != grown[1, 0].token_ids
    assert_same_until_close(models[0], prompt, grown[2, 0].token_ids, grown[0, 0].token_ids)


@pytest.fixture
def stream(started):
    """Set the number of tokens that vLLM sends together."""

    def use(interval: int) -> None:
        started.client.stream_interval = interval

    yield use
    use(1)


@pytest.mark.parametrize("interval", [1, 7])
def test_new_weights_in_flight_split_the_segment_where_they_take_over(interval, stream, vllm, load, driver):
    """Every token's logprob is that of its own version's weights, as far as the cache that they did not make allows.
    At the end, the engine compares its account of versions with vLLM's."""
    stream(interval)
    first, second = load("qwen3"), load("qwen3_next")
    engine = vllm(max_context_tokens=1024)
    leases = [driver.lease(i, PROMPT, 600, temperature=0.0, is_exact=False) for i in range(8)]
    for lease in leases:
        engine.submit(lease)
    reports = driver.grow(engine, 8 * 30)
    engine.load_weights(policy_tensors(second), V1)
    reports += driver.grow(engine, 8 * 30)
    engine.load_weights(policy_tensors(first), V2)
    while sum(r.finish_reason is not None for r in reports) < 8:
        reports += engine.step()
    for lease in leases:
        trajectory = lease.trajectory
        for report in (r for r in reports if r.lease_id == lease.lease_id):
            trajectory = trajectory.extended(report.segments, report.finish_reason)
        assert [s.policy_version for s in trajectory.segments] == [0, 1, 2]
        assert trajectory.num_tokens == 600
        length = len(trajectory.segments[0].token_ids)
        old = torch.log_softmax(logits_of(first, PROMPT, trajectory.token_ids[: length + 1]), -1)
        said = torch.tensor(trajectory.behavior_logprobs[: length + 1])
        chosen = old.gather(1, torch.tensor(trajectory.token_ids[: length + 1])[:, None])[:, 0]
        assert (said - chosen)[:-1].abs().max() < 2e-4, "the last token of the first segment is the old weights'"
        assert abs(said[-1] - chosen[-1]) > 1e-3, "the first of the second is not"


def test_tokens_that_vllm_has_not_sent_are_received_for_a_report_a_load_and_an_abort(stream, vllm, load, driver):
    """By itself, vLLM would send the first token, and all others at the end."""
    stream(1000)
    engine, model = vllm(max_context_tokens=1024), load("qwen3")
    lease = driver.lease(0, PROMPT, 900, temperature=0.0, is_exact=False)
    engine.submit(lease)
    trajectory = lease.trajectory

    def grown(reports) -> int:
        nonlocal trajectory
        for report in reports:
            assert report.finish_reason is None, "the request must not end by itself"
            trajectory = trajectory.extended(report.segments)
        return trajectory.num_tokens

    engine.step()
    while grown(engine.flush()) < 20:
        pass
    engine.load_weights(policy_tensors(load("qwen3_next")), V1)
    while not grown([*engine.step(), *engine.flush()]) or trajectory.policy_versions.count(1) < 20:
        pass
    length = trajectory.policy_versions.count(0)
    expected = torch.log_softmax(logits_of(model, PROMPT, trajectory.token_ids[: length + 1]), -1)
    expected = expected.gather(1, torch.tensor(trajectory.token_ids[: length + 1])[:, None])[:, 0]
    differences = (torch.tensor(trajectory.behavior_logprobs[: length + 1]) - expected).abs()
    assert differences[:-1].max() < 2e-4, "a token before the load has another version"
    assert differences[-1] > 1e-3, "the first token after the load has another version"
    known, reports = trajectory.num_tokens, []
    engine.abort(0)
    while not any(report.is_aborted for report in reports):
        reports += engine.step()
    assert known <= grown(reports) < 900
    assert trajectory.policy_versions == [0] * length + [1] * (trajectory.num_tokens - length)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "wrong shape"])
def test_tensors_that_do_not_fit_are_named_and_change_nothing(fault, vllm, load, driver):
    from baton.errors import EngineFault

    engine, given = vllm(), policy_tensors(load("qwen3_next"))
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
    assert driver.run(engine, [driver.lease(0, PROMPT, 8)])[0] == expected


def test_tied_weights_may_come_under_one_name_or_both_and_in_another_dtype(vllm, load, driver):
    second = load("qwen3_next")
    whole = policy_tensors(second)
    only_head = {("lm_head.weight" if "embed" in name else name): tensor for name, tensor in whole.items()}
    for given in (whole, only_head, dict(second.state_dict()), {n: t.double() for n, t in whole.items()}):
        engine = vllm()
        engine.load_weights(given, PolicyVersion("run", 0))
        trajectory = driver.run(engine, [driver.lease(0, PROMPT, 8)])[0]
        assert_logprobs_are_those_of(second, PROMPT, trajectory)


def test_the_engine_copies_the_tensors_it_is_given(vllm, load, driver):
    engine, given = vllm(), {n: t.clone() for n, t in policy_tensors(load("qwen3_next")).items()}
    engine.load_weights(given, PolicyVersion("run", 0))
    before = driver.run(engine, [driver.lease(0, PROMPT, 8)])[0]
    for tensor in given.values():
        tensor.zero_()
    assert driver.run(engine, [driver.lease(0, PROMPT, 8)])[0] == before


def test_an_adapter_is_served_as_the_base_with_it_merged(vllm, embedded, started, load, driver):
    """Twice: the second belongs to the base too, not to the first."""
    engine, other = vllm(), embedded()
    for number in (1, 2):
        generator = torch.Generator().manual_seed(number)
        adapter = {}
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.up_proj"
            adapter[f"{name}.lora_A.weight"] = torch.randn(4, 192, generator=generator)
            adapter[f"{name}.lora_B.weight"] = torch.randn(256, 4, generator=generator) * 0.05
        grown = []
        for one in (engine, other):
            one.load_weights(adapter, PolicyVersion("run", number))
            lease = driver.lease(number, PROMPT, 16, version=number, temperature=0.0)
            grown.append(driver.run(one, [lease])[number])
        assert grown[0].token_ids == grown[1].token_ids
        assert grown[0].behavior_logprobs == pytest.approx(grown[1].behavior_logprobs, abs=2e-4)


def test_logits_that_are_not_finite_name_the_trajectory(vllm, load, driver):
    from baton.errors import EngineFault

    engine, given = vllm(), policy_tensors(load("qwen3"))
    given["model.norm.weight"] = given["model.norm.weight"] * float("nan")
    engine.submit(driver.lease(21, PROMPT, 100, group_id=4, sample_index=2, is_exact=False))
    driver.grow(engine, 1)
    engine.load_weights(given, V1)
    with pytest.raises(EngineFault, match=r"trajectory 4/2 \(lease 21\): the logits of token \d+ under policy version"):
        driver.hear(engine)
