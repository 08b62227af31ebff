"""Which trajectories an excessive mismatch of engine and trainer is due to, and that the step can be repeated without
them."""

import math

import msgspec
import pytest
from trainer_cases import are_bit_equal, make_group, make_trainer, parameters, policy, random_batch

from baton.errors import Fault, Suspect, TrainingDiverged, fault_of
from baton.trainer.alarms import MAX_SUSPECTS, excessive_mismatch
from baton.trainer.settings import TrainerSettings
from baton.types import Batch, FailureCause, RewardResult

LIMITS = {"max_logprob_diff": (5.0, 15.0)}
"""The default. The logprobs of a random batch differ from the tiny model's by a few nats, those of `lying` by 36."""
LATE, EARLY = Suspect("3/1", 0, 2), Suspect("0/2", 0, 0)


def lying(batch, *suspects):
    """The batch with a logprob of −40 at these tokens."""
    groups = {group.group_id: group for group in batch.groups}
    for suspect in suspects:
        group_id, sample = map(int, suspect.name.split("/"))
        group = groups[group_id]
        prompt = group.members[0].trajectory.prompt_ids
        responses = [list(member.trajectory.segments) for member in group.members]
        tokens = [-4.0, -4.0, -4.0]
        tokens[suspect.token] = -40.0
        (segment,) = responses[sample]
        responses[sample] = [
            msgspec.structs.replace(policy(7, 8, 9, version=segment.policy_version), behavior_logprobs=tuple(tokens))
        ]
        rewards = [member.judgement.reward for member in group.members]
        groups[group_id] = make_group(group_id, rewards, responses, prompt_ids=tuple(prompt))
    return Batch(batch.step, tuple(groups.values()))


def without(batch, *names):
    """The batch in which these trajectories have no reward."""
    none = RewardResult(0.0, {}, False, failure="mistrusted", cause=FailureCause.QUARANTINED)
    groups = []
    for group in batch.groups:
        members = [
            msgspec.structs.replace(m, judgement=none) if not names or m.trajectory.name in names else m
            for m in group.members
        ]
        groups.append(msgspec.structs.replace(group, members=tuple(members)))
    return Batch(batch.step, tuple(groups))


def divergence(trainer, batch):
    with pytest.raises(TrainingDiverged, match=r"logprob diff of engine .* weights are still") as caught:
        trainer.step(batch)
    return caught.value


@pytest.mark.parametrize("settings", [{}, {"num_minibatches": 2, "num_epochs": 2}, {"share_prompts": True}])
def test_the_trajectories_are_named_before_any_update_and_the_step_can_be_repeated_without_them(settings):
    """With several updates, the second minibatch is compared before the first update, too."""
    batch = lying(random_batch(1), LATE, EARLY)
    trainer, untouched = (make_trainer(**LIMITS, **settings) for _ in range(2))
    error = divergence(trainer, batch)
    assert sorted(error.suspects) == [EARLY, LATE]
    assert are_bit_equal(parameters(trainer), parameters(untouched))
    kept = without(batch, "3/1", "0/2")
    for one in (trainer, untouched):
        one.step(kept)
    assert are_bit_equal(parameters(trainer), parameters(untouched)), "as if they had never been there"
    assert trainer.version.number == 1


def test_if_nothing_shows_that_engine_and_trainer_agree_nothing_is_named():
    batch = Batch(1, (make_group(0, (1.0, 0.0), [[policy(5, logprob=-40.0)], [policy(6, logprob=-40.0)]]),))
    trainer = make_trainer(**LIMITS)
    assert divergence(trainer, batch).suspects == []
    trainer.step(random_batch(1))
    again = Batch(2, (make_group(0, (1.0, 0.0), [[policy(t, version=1, logprob=-40.0)] for t in (5, 6)]),))
    assert sorted(divergence(trainer, again).suspects) == [Suspect("0/0", 0, 0), Suspect("0/1", 0, 0)], (
        "now it is shown"
    )


def test_a_batch_without_any_reward_makes_a_version_and_no_gradient():
    trainer = make_trainer(weight_decay=0.0)
    metrics = trainer.step(without(random_batch(1)))
    assert are_bit_equal(parameters(trainer), parameters(make_trainer()))
    assert metrics["tokens/trained"] == 0
    assert all(map(math.isfinite, metrics.values()))
    assert trainer.version.number == 1


def test_the_names_survive_the_way_from_a_rank():
    rows = [(Suspect(f"{group}/15", 3, 4095), 10.0, 1e3, 16.0) for group in range(10**6, 10**6 + 30)]
    text = excessive_mismatch(rows, TrainerSettings(), has_agreed=True)
    fault = fault_of(TrainingDiverged(f"train step 1: {text}; the weights are still those of version 0"))
    received = Fault(fault.kind, fault.text).error()
    assert received.suspects == [row[0] for row in rows[:MAX_SUSPECTS]]
    assert str(received).endswith("still those of version 0"), "nothing is cut"
    assert TrainingDiverged("train step 3: the loss is nan over groups 1, 2").suspects == []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(10.0, 1.0, 1.0), (10.0, 1.0, 2.0)], None),
        # mean KL (90 + 5 + 1) / 30 = 3.2; without the first row (5 + 1) / 20 = 0.3
        ([(10.0, 90.0, 4.0), (10.0, 5.0, 4.0), (10.0, 1.0, 1.0)], [0]),
        # without the first (30 + 1) / 20 = 1.55; without both 0.1
        ([(10.0, 90.0, 4.0), (10.0, 30.0, 4.0), (10.0, 1.0, 1.0)], [0, 1]),
        # a short row with a large mean is no cause: without the first row (3 + 1) / 12 = 0.33
        ([(10.0, 90.0, 4.0), (2.0, 3.0, 4.0), (10.0, 1.0, 1.0)], [0]),
        # one token that is far too unlikely, in a row with a small KL
        ([(10.0, 9.0, 4.0), (10.0, 1.0, 16.0), (10.0, 1.0, 1.0)], [1]),
        # mean KL 210 / 202 = 1.04; without the second row 160 / 200 = 0.8: the first row has most nats, but the mean of
        # its tokens is below the limit
        ([(200.0, 160.0, 4.0), (2.0, 50.0, 4.0)], [1]),
        # mean KL 90 / 80 = 1.1; without the token that is far too unlikely 60 / 70 = 0.86
        ([(10.0, 60.0, 4.0), (10.0, 30.0, 16.0), (60.0, 0.0, 1.0)], [1]),
    ],
)
def test_the_smallest_cause_is_named(rows, expected):
    """Limits: a mean of 1 nat per token, and 15 nats at one token."""
    settings = TrainerSettings(max_mismatch_kl=(0.01, 1.0), max_logprob_diff=(5.0, 15.0))
    named = [(Suspect(f"{index}/0", 0, 0), *row) for index, row in enumerate(rows)]
    text = excessive_mismatch(named, settings, has_agreed=False)
    if expected is None:
        assert text is None
    else:
        assert [one.name for one in TrainingDiverged(text).suspects] == [f"{index}/0" for index in expected]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_mean_of_a_batch_is_compared_and_not_the_mean_of_its_first_minibatch(order):
    """A batch whose mean is within the limit is trained, whichever minibatch has the larger mean."""
    near = make_group(0, (1.0, 0.0), [[policy(*range(4, 24))], [policy(*range(24, 44))]])
    far = make_group(1, (1.0, 0.0), [[policy(5, logprob=-40.0)], [policy(6)]])
    batch = Batch(1, tuple((near, far)[place] for place in order))
    found = make_trainer(num_minibatches=2).step(batch)["policy/mismatch_kl"]
    trainer = make_trainer(num_minibatches=2, max_mismatch_kl=(0.01, 1.01 * found))
    trainer.step(batch)
    assert trainer.version.number == 1
