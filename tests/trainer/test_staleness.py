"""Tokens of several versions in one batch: who gets a gradient, how much, and what the metrics say of it."""

import math

import pytest
import torch
from trainer_cases import (
    are_bit_equal,
    grpo_advantages,
    largest_difference,
    make_group,
    make_trainer,
    parameters,
    policy,
    tiny_model,
)

from baton.trainer.alarms import Alarms
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.settings import TrainerSettings
from baton.types import Batch, PolicyVersion

pytestmark = pytest.mark.numerics

NOW = 3


def mixed_batch(stale_logprob=-4.0, stale_token=40):
    """The trainer holds version 3. One trajectory of versions 1 and 3, one wholly of version 0, one fresh."""
    responses = [
        [policy(5, stale_token, version=1, logprob=stale_logprob), policy(6, 7, version=3, logprob=-3.5)],
        [policy(8, 9, version=0, logprob=stale_logprob)],
        [policy(10, 11, 12, version=3, logprob=-4.5)],
    ]
    return Batch(NOW + 1, (make_group(0, [1.0, 0.0, 0.0], responses),))


def stepped(batch, **settings):
    trainer = make_trainer(version=PolicyVersion("first", batch.step - 1), **settings)
    return trainer, trainer.step(batch)


def test_the_gradient_of_a_mixed_batch_is_that_of_the_formula():
    """max_staleness 1: tokens of versions 0 and 1 are context only; N is 3 all the same, and T_0 is 2."""
    model, batch = tiny_model(), mixed_batch()
    advantages = grpo_advantages(batch.groups)[0]
    objective = torch.zeros(())
    for trajectory, advantage in zip(batch.trajectories, advantages, strict=True):
        ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.token_ids]])
        logprobs = model(ids).logits[0, 1:-1].log_softmax(-1).gather(-1, ids[0, 2:, None]).squeeze(-1)
        fresh = torch.tensor([version >= NOW - 1 for version in trajectory.policy_versions])
        weight = (logprobs.detach() - torch.tensor(trajectory.behavior_logprobs)).exp().clamp(max=2.0)
        if fresh.any():
            objective = objective + (weight * logprobs * advantage)[fresh].mean() / 3
    (-objective).backward()
    trainer, _ = stepped(batch, max_staleness=1, max_grad_norm=math.inf)
    for (name, found), expected in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_a_token_that_is_too_old_gives_no_gradient_but_stays_in_context():
    a, _ = stepped(mixed_batch(stale_logprob=-4.0), max_staleness=1)
    b, _ = stepped(mixed_batch(stale_logprob=-0.1), max_staleness=1)  # who sampled it, and how, is of no consequence
    assert are_bit_equal(parameters(a), parameters(b))
    other, _ = stepped(mixed_batch(stale_token=41), max_staleness=1)  # what it is, is: the later tokens see it
    assert not are_bit_equal(parameters(a), parameters(other))
    trained, _ = stepped(mixed_batch(), max_staleness=3)
    assert largest_difference(parameters(a), parameters(trained)) > 1e-4


def test_a_batch_of_nothing_but_old_tokens_moves_nothing():
    group = make_group(0, [1.0, 0.0], [[policy(5, version=0)], [policy(6, version=1)]])
    trainer, metrics = stepped(Batch(NOW + 1, (group,)), max_staleness=1)
    assert are_bit_equal(parameters(trainer), parameters(make_trainer()))
    assert (metrics["tokens/trained"], metrics["tokens/masked"], metrics["staleness/masked_frac"]) == (0, 2, 1)
    assert "policy/ess" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_metrics_say_how_old_the_tokens_are():
    _, metrics = stepped(mixed_batch(), max_staleness=2)
    # of nine tokens the two of version 0 are masked; ages of the others: 2, 2, 0, 0 and 0, 0, 0
    assert metrics["staleness/mean"] == pytest.approx(4 / 7)
    assert metrics["staleness/max"] == 2
    assert metrics["staleness/stale_frac"] == pytest.approx(2 / 9)
    assert metrics["staleness/masked_frac"] == pytest.approx(2 / 9)
    assert (metrics["tokens/trained"], metrics["tokens/masked"]) == (7, 2)


def test_the_effective_sample_size_by_hand():
    """Weights ½, 4, 1 of three trained tokens: (5½)² / (3 · 17¼) = 0.584541, the truncation at 2 not withstanding."""
    with torch.no_grad():
        own = tiny_model()(torch.tensor([[2, 3]])).logits[0, -1].log_softmax(-1)
    responses = [
        [policy(token, version=NOW - 1, logprob=own[token].item() - math.log(weight))]
        for token, weight in ((5, 0.5), (6, 4.0), (7, 1.0))
    ]
    _, metrics = stepped(Batch(NOW + 1, (make_group(0, [1.0, 0.0, 0.0], responses),)))
    assert metrics["policy/ess"] == pytest.approx(30.25 / 51.75, abs=1e-5)
    assert metrics["policy/weight_mean"] == pytest.approx(3.5 / 3, abs=1e-5)
    assert metrics["policy/weight_cut_frac"] == pytest.approx(1 / 3)
    assert "policy/mismatch_kl" not in metrics  # no token is of the trainer's own version


def test_the_second_moment_is_taken_over_the_whole_minibatch():
    """Each microbatch by itself would keep its own large weight: only together do they exceed the limit."""
    with torch.no_grad():
        own = tiny_model()(torch.tensor([[2, 3]])).logits[0, -1].log_softmax(-1)
    responses = [
        [policy(token, logprob=own[token].item() - log_weight)]
        for token, log_weight in ((5, 0.0), (6, 0.15), (7, 0.1), (8, 0.3))
    ]
    batch = Batch(1, (make_group(0, [1.0, 0.0, 0.0, 1.0], responses),))
    settings = {"correction": "second_moment", "second_moment_limit": 0.02}
    # squares 0, 0.01, 0.0225, 0.09: ascending means 0, 0.005, 0.0108, 0.0306, so the last goes
    for tokens in (3, 1000):
        _, metrics = stepped(batch, max_tokens_per_microbatch=tokens, **settings)
        assert metrics["policy/weight_cut_frac"] == pytest.approx(1 / 4)


def test_at_equal_policies_the_correction_changes_nothing_but_last_bits():
    with torch.no_grad():
        own = tiny_model()(torch.tensor([[2, 3]])).logits[0, -1].log_softmax(-1)
    responses = [[policy(token, logprob=own[token].item())] for token in (5, 6, 7)]
    batch = Batch(1, (make_group(0, [1.0, 0.0, 0.5], responses),))
    plain, _ = stepped(batch, correction="none")
    tis, metrics = stepped(batch, correction="token_tis")
    for a, b in zip(plain.model.parameters(), tis.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)
    assert metrics["policy/ess"] == pytest.approx(1.0, abs=1e-6)


# ---- alarms ----------------------------------------------------------------------------------------------------------


def test_alarms_are_said_when_they_appear_and_not_while_they_stay(caplog):
    alarms = Alarms(AlgorithmSettings(), TrainerSettings())

    def said(**values):
        caplog.clear()
        alarms.watch({name.replace("__", "/"): value for name, value in values.items()})
        return [record.message for record in caplog.records]

    assert said(policy__mismatch_kl=0.01, policy__ess=0.5, staleness__masked_frac=0.5) == []
    (line,) = said(policy__mismatch_kl=0.02)
    assert line.startswith("policy/mismatch_kl is 0.02 nats per token, above 0.01: engine and trainer compute")
    (line,) = said(policy__mismatch_kl=0.03, policy__ess=0.25)
    assert line.startswith("policy/ess (effective sample size per trained token) is 0.25, below 0.5:")
    assert "'token_tis'" in line
    (line,) = said(policy__mismatch_kl=0.03, policy__ess=0.25, policy__logprob_diff_max=5.5)
    assert line.startswith("policy/logprob_diff_max is 5.5 nats, above 5: engine and trainer compute")
    (line,) = said(staleness__masked_frac=0.75)
    assert "raise rollout.max_staleness" in line
    assert len(said(policy__mismatch_kl=0.02)) == 1  # it was absent in between, so it is new


def test_a_train_step_sounds_them(caplog):
    group = make_group(0, [1.0, 0.0], [[policy(5, 6, 7, version=0)], [policy(8, version=NOW, logprob=-0.01)]])
    stepped(Batch(NOW + 1, (group,)), max_staleness=0)
    own = [record for record in caplog.records if record.name.startswith("baton")]  # asyncio logs tasks of other tests
    assert [record.message.split(" is ")[0] for record in own] == ["policy/mismatch_kl", "staleness/masked_frac"]
