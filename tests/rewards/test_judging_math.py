"""Mathematical equality: as a reward part, and as the scorer of a file."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from judging_cases import drain_past_deadlines, hand_clock, trajectory

from baton.rewards.scorer import RewardScorer
from baton.rewards.scoring_thread import ScoringThread
from baton.rewards.settings import JudgeSettings, RewardSettings
from baton.tasks.stream import AnswerSettings, TaskMixture, TaskSettings
from baton.types import FailureCause, Prompt

pytestmark = [pytest.mark.timing, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> TaskMixture:
    file = tmp_path_factory.mktemp("math") / "rows.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode({"prompt": f"{i}?", "answer": str(i)}) + b"\n" for i in range(40)))
    return TaskMixture([TaskSettings(name="file", path=str(file), scorer="math")], AnswerSettings())


@pytest.fixture(scope="module")
def judge(mixture: TaskMixture) -> Iterator[RewardScorer]:
    rewards = [RewardSettings(kind="correct"), RewardSettings(kind="math", weight=0.5)]
    with RewardScorer(
        mixture.tasks, rewards, {"file": AnswerSettings(format="boxed")}, JudgeSettings(deadline_s=60.0, retries=0)
    ) as found:
        yield found


def asking_for(reference: str) -> Prompt:
    return Prompt("p", "file", (), reference)


@pytest.mark.parametrize(
    ("reference", "answer", "is_equal"),
    [
        ("1/2", "\\frac{1}{2}", True),
        ("\\frac{1}{2}", "0.5", True),
        ("72", "72.0", True),
        ("1,000", "1000", True),
        ("\\sqrt{8}", "2\\sqrt{2}", True),
        ("x^2 + 1", "1 + x^2", True),
        ("thus $x = 4$, so \\boxed{4}", "4", True),  # a whole solution as reference
        ("\\text{Paris}", "\\text{Paris}", True),
        ("36", "\\$36", True),  # a currency sign marks no mathematics
        ("\\$1{,}200", "1200", True),
        ("\\$32,\\!348", "\\$32,348", True),
        ("x = \\$5", "\\$5", True),
        ("\\$36", "\\$37", False),
        ("1/2", "\\frac{1}{3}", False),
        ("72", "27", False),
        ("72", "", False),
        ("72", "of course", False),
    ],
)
def test_answers_are_compared_as_mathematics(judge: RewardScorer, reference: str, answer: str, is_equal: bool) -> None:
    judgement = judge.score(asking_for(reference), f"I think \\boxed{{{answer}}}")
    assert judgement.failure is None
    assert judgement.parts == {"correct": float(is_equal), "math": float(is_equal)}
    assert judgement.reward == 1.5 * is_equal
    assert judgement.is_correct is is_equal


def test_a_response_without_an_answer_is_wrong_without_asking(judge: RewardScorer) -> None:
    assert judge.score(asking_for("1"), "I do not know").parts == {"correct": 0.0, "math": 0.0}


def test_a_reference_that_cannot_be_read_is_a_failure_and_no_zero(judge: RewardScorer) -> None:
    judgement = judge.score(asking_for("\\boxed{}"), "\\boxed{4}")
    assert judgement.cause is FailureCause.MALFORMED
    assert judgement.failure == "math-verify cannot read the reference '\\\\boxed{}' as mathematics"


def test_pathological_mathematics_is_killed_and_the_others_are_judged(
    mixture: TaskMixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = hand_clock(monkeypatch)
    settings = JudgeSettings(deadline_s=2.0, retries=0, workers=2)
    with RewardScorer(
        mixture.tasks, [RewardSettings(kind="correct")], {"file": AnswerSettings(format="boxed")}, settings
    ) as judge:
        answers = ["9^{9^{9^{9}}}", "4.0", "\\frac{8}{2}", "2^2", "((10!)!)!"]
        for index, answer in enumerate(answers):
            judge.submit([trajectory(0, index)], asking_for("4"), [f"\\boxed{{{answer}}}"])
        found = drain_past_deadlines(judge, clock, 2.0, in_time=3, late=2)
        assert judge.score(asking_for("4"), "\\boxed{4.0}").is_correct, "by a process that takes a killed one's place"
    assert [(j.trajectory.sample_index, j.judgement.is_correct) for j in found[:3]] == [(i, True) for i in (1, 2, 3)]
    assert {j.judgement.cause for j in found[3:]} == {FailureCause.TIMEOUT}


def test_a_part_and_a_scorer_that_are_the_same_are_asked_once(
    judge: RewardScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = ScoringThread.call_worker

    def counted(thread: ScoringThread, spec: int, *arguments: object, **keys: object) -> object:
        calls.append(spec)
        return original(thread, spec, *arguments, **keys)  # type: ignore[arg-type]

    monkeypatch.setattr(ScoringThread, "call_worker", counted)
    judge.score(asking_for("1/3"), "\\boxed{2/6}")
    assert len(calls) == 1


def test_without_math_verify_one_sentence_names_the_command(
    mixture: TaskMixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"math-verify is not installed: run `pip install 'baton-rl\[math\]'`"):
        RewardScorer(mixture.tasks, [RewardSettings(kind="correct")], {"file": AnswerSettings(format="boxed")})
