"""A trajectory without a judgement takes no part in its group's statistics, gets no gradient, and is counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from baton.errors import UserError
from baton.records.evaluation import Evaluation, evaluation_metrics
from baton.rewards.scorer import RewardScorer, failure_metrics, require_judged
from baton.rewards.settings import AnswerSettings, RewardSettings
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import FakeEngine
from baton.rollout.eval_rollout import EvalRollout
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import WorkerClient
from baton.run.evaluation import Evaluator
from baton.run.tokenization import PromptEncoder
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.microbatches import cut
from baton.trainer.samples import batch_metrics, training_samples, with_advantages
from baton.types import (
    Batch,
    FailureCause,
    FinishReason,
    Group,
    Message,
    PolicyVersion,
    Prompt,
    RewardResult,
    SamplingParams,
    ScoredTrajectory,
    Segment,
    Trajectory,
)

pytestmark = pytest.mark.timing

GRPO = AlgorithmSettings()
FAILED = {
    cause: RewardResult(0.0, {}, False, None, f"the judge {cause}", cause)
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
            else RewardResult(reward, {"correct": reward}, reward == 1.0, "4")
        )
        members.append(ScoredTrajectory(trajectory, judgement))
    return Group(group_id, Prompt("p", "some", ()), tuple(members))


HALF = group(0, [1.0, FailureCause.TIMEOUT, 0.0, FailureCause.CRASHED, 1.0])
ALONE = group(1, [FailureCause.TIMEOUT, 1.0, FailureCause.TIMEOUT])
NOBODY = group(2, [FailureCause.CRASHED, FailureCause.CRASHED])


def test_statistics_are_over_judged_members_alone() -> None:
    # rewards 1, 0, 1: mean 2/3; Σ = 2·(1/3)² + (2/3)² = 2/3; std = √(1/3) = 0.5773503
    # A = (1/3) / 0.5773513 = 0.5773493 and (−2/3) / 0.5773513 = −1.1546985. With zeros in place of the two failures
    # the mean would be 2/5 and the failures would be pushed down.
    (found,) = with_advantages([training_samples([HALF, ALONE, NOBODY], GRPO)], GRPO)
    assert [row.name for row in found] == ["0/0", "0/2", "0/4"]
    for row, advantage in zip(found, (0.5773493, -1.1546985, 0.5773493), strict=True):
        assert row.advantages == pytest.approx(np.full(row.num_policy, advantage), abs=1e-6)


def test_only_judged_members_of_comparable_groups_reach_the_loss_and_its_divisor() -> None:
    groups = [HALF, ALONE, NOBODY]
    (found,) = with_advantages([training_samples(groups, GRPO)], GRPO)
    part = cut(found, max_tokens_per_microbatch=1000, device=torch.device("cpu"))
    assert part.num_episodes == 3
    assert part.num_trained_tokens == 1 + 3 + 5  # members 0, 2 and 4 of the first group
    assert {row.group_id for micro in part.microbatches for row in micro.rows} == {0}


def test_metrics_leave_failures_out_and_count_them() -> None:
    found = batch_metrics(Batch(1, (HALF, ALONE, NOBODY)), training_samples([HALF, ALONE, NOBODY], GRPO), GRPO)
    assert found["reward/mean"] == pytest.approx(3 / 4)  # 1, 0, 1 and 1
    assert found["reward/correct/mean"] == pytest.approx(3 / 4)
    assert found["accuracy/mean"] == pytest.approx(3 / 4)
    assert found["reward/zero_std_frac"] == 0.0  # of the one group that has two judged members
    assert found["judge/groups_lost"] == 2.0
    assert found["tokens/trained"] == 9.0
    assert failure_metrics([HALF, ALONE, NOBODY]) == {"judge/failed": 6, "judge/timeout": 3, "judge/crashed": 3}
    assert failure_metrics([group(0, [1.0, 0.0])]) == {"judge/failed": 0}


def test_a_batch_without_any_judgement_has_no_reward() -> None:
    found = batch_metrics(Batch(1, (NOBODY,)), training_samples([NOBODY], GRPO), GRPO)
    assert not {"reward/mean", "reward/std", "reward/zero_std_frac", "accuracy/mean"} & found.keys()
    assert found["tokens/trained"] == 0.0


def test_a_step_without_any_judgement_stops_the_run_with_the_first_cause() -> None:
    require_judged([NOBODY, ALONE], "train step 3")
    with pytest.raises(
        UserError, match="none of the 2 trajectories of train step 3 could be scored: the judge crashed"
    ):
        require_judged([NOBODY], "train step 3")


class Words:
    """A tokenizer for the fake engine: a prompt is its own number, a response the number of its tokens."""

    def prompt_ids(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return (int(messages[-1].content),)

    def text(self, token_ids: list[int], *, keep_special: bool = False) -> str:
        return str(len(token_ids))


class BreaksAtThree:
    """A task solved by two tokens, whose scorer breaks on three."""

    name = "some"
    scorer = "inline"
    columns = ()

    def score(self, answer: str | None, reference: str | None, metadata: object) -> float:
        if answer == "3":
            raise ZeroDivisionError("three")
        return float(answer == "2")


def evaluated(lengths: dict[tuple[int, int], int], samples: int) -> Evaluation:
    """The evaluation of prompts 0 and 1 whose sample i has lengths[prompt, i] tokens."""
    prompts = [Prompt(str(p), "some", (Message("user", str(p + 5)),), "2") for p in (0, 1)]
    engine = FakeEngine(
        EngineSettings(slots=8, max_context_tokens=64), PolicyVersion("e", 0), lambda g, s: lengths[g, s]
    )
    judge = RewardScorer(
        {"some": BreaksAtThree()}, [RewardSettings(kind="correct")], {"some": AnswerSettings(format="last_line")}
    )  # type: ignore[dict-item]
    (result,), _ = Evaluator(
        prompts,
        PromptEncoder(Words()),  # type: ignore[arg-type]
        judge,
        EvalRollout(WorkerClient(LocalTransport(engine))),
        samples,
    ).evaluate(SamplingParams(9), version=0)
    return result


def test_accuracy_is_over_what_was_judged_and_says_how_much_was_not() -> None:
    # prompt 0: right, unjudged; prompt 1: wrong, right: mean of 1/1 and 1/2
    result = evaluated({(0, 0): 2, (0, 1): 3, (1, 0): 4, (1, 1): 2}, 2)
    assert (result.accuracy.value, result.pass_at_k.value, result.unjudged) == (0.75, 1.0, 1)
    assert (result.samples, result.num_prompts) == (2, 2)
    # prompt 0 has no judgement at all: accuracy is that of prompt 1
    result = evaluated({(0, 0): 3, (1, 0): 2}, 1)
    assert (result.accuracy.value, result.unjudged) == (1.0, 1)
    assert evaluation_metrics(result)["eval/some/unjudged"] == 1
    assert "eval/some/unjudged" not in evaluation_metrics(evaluated({(0, 0): 4, (1, 0): 2}, 1))


def test_an_evaluation_of_which_nothing_was_judged_has_no_accuracy() -> None:
    result = evaluated({(0, 0): 3, (0, 1): 3, (1, 0): 3, (1, 1): 3}, 2)
    assert (result.accuracy, result.pass_at_k, result.unjudged) == (None, None, 4)
    assert evaluation_metrics(result) == {"eval/some/response_length": 3.0, "eval/some/unjudged": 4}


class WithoutReference:
    """A task of prompts alone."""

    name = "some"
    scorer = None
    columns = ()


def test_without_a_scorer_correct_is_what_all_parts_of_positive_weight_call_full() -> None:
    judge = RewardScorer({"some": WithoutReference()}, [RewardSettings(kind="format")], {})  # type: ignore[dict-item]
    prompt = Prompt("p", "some", ())
    assert judge.score(prompt, "<answer>3</answer>").is_correct
    assert not judge.score(prompt, "3").is_correct


def test_an_evaluation_has_a_group_compared_as_a_whole(tmp_path: Path) -> None:
    """Prompt 0 has lengths 4, 1, 3: the two that are shorter than the longest of their group count as correct."""
    file = tmp_path / "compared.py"
    file.write_text(
        "def f(prompts, completions, **_):\n    return [float(c != max(completions)) for c in completions]\n"
    )
    reward = RewardSettings(kind="function", function=f"{file}:f", isolate=False)
    judge = RewardScorer({"some": WithoutReference()}, [reward], {"some": AnswerSettings(format="last_line")})  # type: ignore[dict-item]
    lengths = {(0, 0): 4, (0, 1): 1, (0, 2): 3}
    engine = FakeEngine(
        EngineSettings(slots=8, max_context_tokens=64), PolicyVersion("e", 0), lambda g, s: lengths[g, s]
    )
    (result,), (found,) = Evaluator(
        [Prompt("0", "some", (Message("user", "5"),), "2")],
        PromptEncoder(Words()),  # type: ignore[arg-type]
        judge,
        EvalRollout(WorkerClient(LocalTransport(engine))),
        3,
    ).evaluate(SamplingParams(9), version=0)
    assert [m.judgement.reward for m in found.members] == [0.0, 1.0, 1.0]
    assert result.accuracy.value == pytest.approx(2 / 3)
