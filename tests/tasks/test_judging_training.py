"""A trajectory without a judgement takes no part in its group's statistics, gets no gradient, and is counted."""

from __future__ import annotations

import pytest
import torch

from baton.errors import UserError
from baton.tasks.rewards import failure_metrics, require_judged
from baton.trainer.advantages import group_relative
from baton.trainer.batch import batch_metrics, minibatches
from baton.types import (
    Batch,
    FailureCause,
    FinishReason,
    Group,
    Judged,
    Judgement,
    Prompt,
    Segment,
    Trajectory,
)

FAILED = {
    cause: Judgement(0.0, {}, False, None, f"the judge {cause}", cause)
    for cause in (FailureCause.TIMEOUT, FailureCause.CRASHED)
}


def group(group_id: int, rewards: list[float | FailureCause]) -> Group:
    """Members by reward, or by why they have none; member i has i + 1 tokens."""
    members = []
    for index, reward in enumerate(rewards):
        tokens = tuple(range(5, 6 + index))
        segment = Segment(tokens, (-1.0,) * len(tokens), 0)
        trajectory = Trajectory(group_id, index, (2, 3), (segment,), FinishReason.STOP)
        judgement = (
            FAILED[reward]
            if isinstance(reward, FailureCause)
            else Judgement(reward, {"correct": reward}, reward == 1.0, "4")
        )
        members.append(Judged(trajectory, judgement))
    return Group(group_id, Prompt("p", "some", ()), tuple(members))


HALF = group(0, [1.0, FailureCause.TIMEOUT, 0.0, FailureCause.CRASHED, 1.0])
ALONE = group(1, [FailureCause.TIMEOUT, 1.0, FailureCause.TIMEOUT])
NOBODY = group(2, [FailureCause.CRASHED, FailureCause.CRASHED])


def test_statistics_are_over_judged_members_alone() -> None:
    # rewards 1, 0, 1: mean 2/3; Σ = 2·(1/3)² + (2/3)² = 2/3; std = √(1/3) = 0.5773503
    # A = (1/3) / 0.5773513 = 0.5773493 and (−2/3) / 0.5773513 = −1.1546985. With zeros in place of the two failures
    # the mean would be 2/5 and the failures would be pushed down.
    found = group_relative([HALF, ALONE, NOBODY])
    assert found[0] == pytest.approx((0.5773493, 0.0, -1.1546985, 0.0, 0.5773493), abs=1e-6)
    assert found[1] == (0.0, 0.0, 0.0)
    assert found[2] == (0.0, 0.0)
    assert group_relative([group(0, [1.0, 0.0, 1.0])])[0] == tuple(found[0][i] for i in (0, 2, 4))


def test_only_judged_members_of_comparable_groups_reach_the_loss_and_its_divisor() -> None:
    groups = [HALF, ALONE, NOBODY]
    (part,) = minibatches(
        groups,
        group_relative(groups),
        num_minibatches=1,
        max_tokens_per_microbatch=1000,
        device=torch.device("cpu"),
    )
    assert part.num_trajectories == 3
    assert part.num_trained_tokens == 1 + 3 + 5  # members 0, 2 and 4 of the first group
    assert {i for micro in part.microbatches for i in micro.group_ids} == {0}


def test_metrics_leave_failures_out_and_count_them() -> None:
    found = batch_metrics(Batch(1, (HALF, ALONE, NOBODY)))
    assert found["reward/mean"] == pytest.approx(3 / 4)  # 1, 0, 1 and 1
    assert found["reward/correct/mean"] == pytest.approx(3 / 4)
    assert found["accuracy/mean"] == pytest.approx(3 / 4)
    assert found["reward/zero_std_frac"] == 0.0  # of the one group that has two judged members
    assert found["judge/groups_lost"] == 2.0
    assert found["tokens/trained"] == 9.0
    assert failure_metrics([HALF, ALONE, NOBODY]) == {"judge/failed": 6, "judge/timeout": 3, "judge/crashed": 3}
    assert failure_metrics([group(0, [1.0, 0.0])]) == {"judge/failed": 0}


def test_a_batch_without_any_judgement_has_no_reward() -> None:
    found = batch_metrics(Batch(1, (NOBODY,)))
    assert not {"reward/mean", "reward/std", "reward/zero_std_frac", "accuracy/mean"} & found.keys()
    assert found["tokens/trained"] == 0.0


def test_a_step_without_any_judgement_stops_the_run_with_the_first_cause() -> None:
    require_judged([NOBODY, ALONE], "train step 3")
    with pytest.raises(
        UserError, match="none of the 2 trajectories of train step 3 could be judged: the judge crashed"
    ):
        require_judged([NOBODY], "train step 3")
