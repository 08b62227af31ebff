"""From a batch to training samples: who is trained, with which reward, and what the metrics say of it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import environment, make_group, policy

from baton.errors import EngineFault, UserError
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.samples import batch_metrics, minibatches, split_evenly, training_samples
from baton.types import Batch, FinishReason, Group, RewardResult, ScoredTrajectory

GRPO = AlgorithmSettings()
REINFORCE = AlgorithmSettings(advantage="return_to_go")
"""Compares no trajectory with its group, so that one scored member is enough."""


def test_a_group_that_cannot_be_compared_is_refused_by_name():
    with pytest.raises(UserError, match=r"group 5 has 1 members, allowed are 2 or more"):
        minibatches(Batch(1, (make_group(5, [1.0]),)), GRPO)
    with pytest.raises(UserError, match=r"group 6 has 0 members, allowed are 1 or more"):
        minibatches(Batch(1, (make_group(6, []),)), REINFORCE)
    ((alone,),) = minibatches(Batch(1, (make_group(5, [1.0]),)), REINFORCE)
    assert alone.name == "5/0"


def test_a_batch_becomes_minibatches_with_advantages_unless_a_critic_gives_them():
    batch = Batch(1, (make_group(0, [1.0, 0.0]), make_group(1, [0.0, 1.0])))
    parts = minibatches(batch, AlgorithmSettings(advantage="group_mean", num_minibatches=2))
    assert [[(s.name, s.advantages.tolist()) for s in part] for part in parts] == [
        [("0/0", [0.5]), ("0/1", [-0.5])],
        [("1/0", [-0.5]), ("1/1", [0.5])],
    ]
    (part,) = minibatches(batch, AlgorithmSettings(name="ppo", num_minibatches=1))
    assert [s.advantages for s in part] == [None] * 4


def without_judgement(group, *places):
    """The same group, with some of its members not judged."""
    failed = RewardResult(0.0, {}, False, failure="the judge gave no answer")
    members = [ScoredTrajectory(m.trajectory, failed) if i in places else m for i, m in enumerate(group.members)]
    return Group(group.group_id, group.prompt, tuple(members))


@pytest.mark.parametrize(
    ("unjudged", "compared", "alone"),
    [((), [0, 1, 2], [0, 1, 2]), ((0,), [1, 2], [1, 2]), ((0, 1), [], [2]), ((0, 1, 2), [], [])],
)
def test_a_group_is_compared_by_its_judged_members_and_needs_two_of_them(unjudged, compared, alone):
    group = without_judgement(make_group(0, [1.0, 0.0, 0.5]), *unjudged)
    for algorithm, members in ((GRPO, compared), (REINFORCE, alone)):
        assert [s.name for s in training_samples([group], algorithm)] == [f"0/{i}" for i in members]
        metrics = batch_metrics(Batch(1, (group,)), [], algorithm)
        assert metrics["judge/groups_lost"] == (not members)


@pytest.mark.parametrize(
    ("given_rewards", "is_equal"), [([0.5, 0.5], True), ([0.5, 0.4], False), ([0.1, 0.2, 0.3], False)]
)
def test_rewards_are_equal_where_the_judged_ones_are(given_rewards, is_equal):
    unjudged = without_judgement(make_group(0, [*given_rewards, 9.0]), len(given_rewards))
    for group in (make_group(0, given_rewards), unjudged):
        assert batch_metrics(Batch(1, (group,)), [], GRPO)["reward/zero_std_frac"] == is_equal


@given(st.integers(1, 30), st.integers(1, 30))
def test_minibatches_are_whole_groups_in_order_and_as_even_as_they_go(num_groups, num_parts):
    groups = [make_group(i, [0.0, 1.0]) for i in range(num_groups)]
    if num_parts > num_groups:
        with pytest.raises(UserError, match=rf"got {num_parts}, allowed are at most {num_groups}, the groups"):
            split_evenly(groups, num_parts)
        return
    parts = split_evenly(groups, num_parts)
    assert [group.group_id for part in parts for group in part] == list(range(num_groups))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_overlong_shaping_takes_the_whole_length_however_often_it_was_resumed():
    """Of at most 20 tokens the last half is the zone: 10 tokens lose nothing, 15 half, 20 all, versions or not."""
    responses = [
        [policy(*range(5, 11), version=1), policy(*range(4, 8), version=2)],
        [policy(*range(5, 13), version=1), policy(*range(4, 11), version=2)],
        [policy(*range(5, 25), version=2)],
    ]
    group = make_group(0, [1.0, 1.0, 0.0], responses)
    found = training_samples([group], AlgorithmSettings(overlong_frac=0.5), longest=20)
    assert [row.reward for row in found] == [1.0, 0.5, -1.0]
    metrics = batch_metrics(Batch(3, (group,)), found, AlgorithmSettings(overlong_frac=0.5), longest=20)
    assert metrics["reward/overlong/mean"] == pytest.approx(-0.5)
    assert metrics["reward/mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_logprob_that_is_no_number_is_refused_by_the_trajectorys_name(value):
    group = make_group(3, [1.0, 0.0], [[policy(5)], [policy(6, 7), policy(8, version=1, logprob=value)]])
    with pytest.raises(EngineFault, match=rf"trajectory 3/1: .* log-probability {value} for token 2 of the response"):
        training_samples([group], GRPO)


def test_batch_metrics_by_hand():
    mixed = make_group(
        0,
        [1.0, 0.0],
        [[policy(5, version=1), environment(9, version=1), policy(6, 7, version=3)], [policy(8, version=3)]],
    )
    equal = make_group(1, [0.5, 0.5], finish_reason=FinishReason.LENGTH)  # one token each, of version 0
    batch = Batch(4, (mixed, equal))
    found = batch_metrics(batch, training_samples(batch.groups, GRPO), GRPO)
    assert found == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(0.125**0.5),  # deviations ½, −½, 0, 0
        "reward/zero_std_frac": 0.5,
        "reward/correct/mean": 0.5,
        "accuracy/mean": 0.25,
        "response_length/mean": 6 / 4,  # 3, 1, 1, 1, without the environment's token
        "response_length/max": 3.0,
        "response_length/clip_ratio": 0.5,
        "staleness/mean": 8 / 6,  # the trainer holds version 3: ages 2, 0, 0 | 0 | 3 | 3
        "staleness/max": 3.0,
        "staleness/stale_frac": 0.5,
        "staleness/masked_frac": 0.0,
        "judge/groups_lost": 0.0,
        "tokens/trained": 6.0,
        "tokens/masked": 0.0,
        "tokens/filtered": 0.0,
    }
    # the two tokens of version 0 are too old
    bounded = batch_metrics(batch, training_samples(batch.groups, GRPO, oldest=1), GRPO)
    assert {name: bounded[name] for name in bounded if name.startswith(("staleness", "tokens"))} == {
        "staleness/mean": 2 / 4,
        "staleness/max": 2.0,
        "staleness/stale_frac": 1 / 6,
        "staleness/masked_frac": 2 / 6,
        "tokens/trained": 4.0,
        "tokens/masked": 2.0,
        "tokens/filtered": 0.0,
    }
    assert {n: v for n, v in bounded.items() if n.startswith("reward")} == {
        n: v for n, v in found.items() if n.startswith("reward")
    }
