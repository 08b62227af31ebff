"""Rows of public benchmarks with their own columns: what is asked, what is the reference, what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.rewards.scorer import RewardScorer
from baton.rewards.settings import JudgeSettings, RewardSettings
from baton.tasks.stream import AnswerSettings, EvalTaskSettings, TaskMixture

GSM8K = {
    "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How "
    "many clips did Natalia sell altogether in April and May?",
    "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether "
    "in April and May.\n#### 72",
}
MATH_500 = {
    "problem": "Convert the point $(0,3)$ in rectangular coordinates to polar coordinates.  Enter your answer in the "
    "form $(r,\\theta),$ where $r > 0$ and $0 \\le \\theta < 2 \\pi.$",
    "solution": "We have that $r = \\sqrt{0^2 + 3^2} = 3.$ Therefore, the polar coordinates are "
    "$\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.$",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
AIME = {
    "id": 60,
    "problem": "Every morning Aya goes for a $9$-kilometer-long walk and stops at a coffee shop afterwards.",
    "solution": "$9(60) + 24 - 2 = 204$. The answer is $\\boxed{204}$",
    "answer": "204",
    "url": "https://artofproblemsolving.com/wiki/index.php/2024_AIME_I_Problems/Problem_1",
    "year": "2024",
}
AIME_CAPITALS = {"ID": "2024-II-4", "Problem": "Let $x,y$ and $z$ be positive.", "Solution": "So.", "Answer": 33}
MMLU = {
    "question": "Find the degree for the given field extension Q(sqrt(2), sqrt(3), sqrt(18)) over Q.",
    "subject": "abstract_algebra",
    "choices": ["0", "4", "2", "6"],
    "answer": 1,
}
MMLU_PRO = {
    "question_id": 70,
    "question": "Typical advertising regulatory bodies suggest that adverts must not: cause ________.",
    "options": [f"option {n}" for n in range(10)],
    "answer": "I",
    "answer_index": 8,
}
ARC = {
    "id": "Mercury_7175875",
    "question": "Which of these will most likely result in dry skin?",
    "choices": {"text": ["dry palms", "wet palms", "palms with lotion"], "label": ["1", "2", "3"]},
    "answerKey": "3",
}
LAST_NUMBER, BOXED, LETTER = ({"format": name} for name in ("last_number", "boxed", "letter"))


def opened(tmp_path: Path, row: dict[str, Any], **keys: Any) -> TaskMixture:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return TaskMixture([], AnswerSettings(), tests=[EvalTaskSettings(name="test", path=str(file), **keys)])


@pytest.mark.parametrize(
    ("row", "keys", "reference", "right", "wrong"),
    [
        (
            GSM8K,
            {"answer": LAST_NUMBER},
            "72",
            ["48 + 24 = 72", "She sold **72** clips.", "<think>24?</think>\nIt is $72.00.", "#### 72", "\\boxed{72}"],
            ["48 + 24 = 72, not 24", "<think>72</think> I do not know", "-72", "720", "x72"],
        ),
        (GSM8K | {"answer": "so\n#### 1,200"}, {"answer": LAST_NUMBER}, "1,200", ["$1200", "1,200 clips"], ["1,2,00"]),
        (GSM8K, {"answer": BOXED}, "72", ["so \\boxed{72}", "\\boxed{72.0}"], ["72", "\\boxed{24}"]),
        (
            GSM8K,
            {"answer": {"format": "regex", "pattern": r"(?:####|total:) *(-?\d+)"}},
            "72",
            ["#### 24\n#### 72", "total:72"],
            ["72", "total: 24"],
        ),
        (
            MATH_500,
            {"answer": BOXED, "scorer": "math"},
            MATH_500["answer"],
            [
                "\\boxed{(3, \\frac{\\pi}{2})}",
                "so $\\boxed{\\left(3,\\dfrac{\\pi}{2}\\right)}$",
                "\\boxed{(3, 0.5\\pi)}",
            ],
            ["\\boxed{(\\frac{\\pi}{2}, 3)}", "\\boxed{(3, \\pi)}", "(3, \\frac{\\pi}{2})"],
        ),
        (AIME, {"answer": BOXED, "scorer": "math"}, "204", ["\\boxed{204}", "\\boxed{204.0}"], ["\\boxed{24}", "204"]),
        (AIME_CAPITALS, {"answer": BOXED}, "33", ["\\boxed{033}", "\\boxed{33}"], ["\\boxed{330}"]),
        (
            MMLU,
            {"answer": LETTER, "scorer": "letter"},
            "B",
            [
                "B",
                "(B)",
                "B. 4",
                "Answer: B",
                "**Answer:** B",
                "The answer is (B).",
                "A is 0. The answer is $\\boxed{\\text{B}}$",
                "Option A is wrong.\nThe correct choice is B because 4 is the degree.",
                "<think>C? The answer is C</think>B)",
                "I would say\n(B)",
            ],
            ["4", "C", "A or B", "The answer is A, not B", "<think>The answer is B</think>", "Because", "b4"],
        ),
        (
            MMLU,
            {"answer": {"format": "tags"}, "scorer": "letter"},
            "B",
            ["<answer>B. 4</answer>"],
            ["<answer>4</answer>"],
        ),
        (MMLU_PRO, {"answer": LETTER, "scorer": "letter"}, "I", ["The answer is (I)."], ["I think it is A", "J"]),
        (ARC, {"answer": LETTER, "scorer": "letter"}, "C", ["Answer: C"], ["3", "A"]),
    ],
)
def test_responses_to_a_row_of_a_benchmark_are_scored(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, Any], reference: str, right: list[str], wrong: list[str]
) -> None:
    mixture = opened(tmp_path, row, **keys)
    (prompt,) = mixture.held_out(256, or_fewer=True)
    assert prompt.answer == reference
    rewards = [RewardSettings(kind="correct")]
    with RewardScorer(mixture.scored_tasks, rewards, mixture.answers, JudgeSettings(deadline_s=60.0)) as scorer:
        for response in (*right, *wrong):
            assert scorer.score(prompt, response).reward == float(response in right), response


def test_a_choice_is_asked_for_below_its_question_with_letters(tmp_path: Path) -> None:
    for row, last in (
        (MMLU, "\n\nA. 0\nB. 4\nC. 2\nD. 6"),
        (ARC, "\n\nA. dry palms\nB. wet palms\nC. palms with lotion"),
    ):
        mixture = opened(tmp_path, row, scorer="letter", answer=LETTER)
        (prompt,) = mixture.held_out(1, or_fewer=True)
        system, user = prompt.messages
        assert "letter of the correct choice" in system.content
        assert user.content == row["question"] + last
    # without this scorer, a column of this name is not read, as before
    (prompt,) = opened(tmp_path, MMLU).held_out(1, or_fewer=True)
    assert prompt.messages[-1].content == MMLU["question"]


@pytest.mark.parametrize(
    ("answer", "letter"),
    [(0, "A"), (3, "D"), ("B", "B"), ("6", "D"), ("4", "B")],  # a text is a choice, a number is an index
)
def test_the_correct_choice_is_an_index_a_letter_or_a_text(tmp_path: Path, answer: object, letter: str) -> None:
    (prompt,) = opened(tmp_path, MMLU | {"answer": answer}, scorer="letter").held_out(1, or_fewer=True)
    assert prompt.answer == letter


@pytest.mark.parametrize("labels", [[1, 2, 3], ["1", "2", "3"]])
@pytest.mark.parametrize("answer", [1, "1"])
def test_a_label_of_the_row_is_no_index(tmp_path: Path, labels: list[object], answer: object) -> None:
    row = ARC | {"choices": {**ARC["choices"], "label": labels}, "answerKey": answer}
    (prompt,) = opened(tmp_path, row, scorer="letter").held_out(1, or_fewer=True)
    assert prompt.answer == "A"


@pytest.mark.parametrize("answer", [4, -1, "E", "5", 1.5])
def test_an_answer_that_is_none_of_the_choices_is_refused(tmp_path: Path, answer: object) -> None:
    with pytest.raises(
        UserError, match=r"rows.jsonl, line 1: scorer = \"letter\" needs the correct choice as .* 4 choi"
    ):
        opened(tmp_path, MMLU | {"answer": answer}, scorer="letter")


def test_letters_without_choices_are_references_as_they_are(tmp_path: Path) -> None:
    row = {"prompt": "Which? A. this B. that", "answer": "B"}
    (prompt,) = opened(tmp_path, row, scorer="letter").held_out(1, or_fewer=True)
    assert (prompt.messages[-1].content, prompt.answer) == (row["prompt"], "B")


def test_all_rows_have_the_prompt_in_the_column_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": 2}\n{"question": null, "problem": "1 + 2?", "answer": 3}\n')
    with pytest.raises(UserError, match="line 2 has no 'question'; it has"):
        TaskMixture([], AnswerSettings(), tests=[EvalTaskSettings(name="t", path=str(file))])
