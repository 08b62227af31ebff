"""The two tasks of our own draw reasoning-gym's problems and give its scores, and need no reasoning-gym."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.tasks.arithmetic import ArithmeticProblems, value
from baton.tasks.gym import GymTask, gym_tasks

SMALL = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
PARAMS: list[tuple[str, dict[str, Any]]] = [
    ("chain_sum", {}),
    ("chain_sum", {"allow_negation": True}),
    ("chain_sum", {**SMALL, "max_terms": 4}),
    ("basic_arithmetic", {}),
    ("basic_arithmetic", SMALL),
    ("basic_arithmetic", {"whitespace": "random", "max_terms": 9}),
    ("basic_arithmetic", {"whitespace": "no_space"}),
    ("basic_arithmetic", {"format_style": "natural", "allow_negation": False}),
    ("basic_arithmetic", {"operators": ["-", "/"], "min_terms": 4, "max_terms": 9}),
]
ANSWERS = (None, "", "{}", "+0{}", "{}.0", "x{}", " {} ", "1,0{}", "nan", "snan", "1e999999999", "\ud800", "٣")


@pytest.mark.parametrize(("name", "params"), PARAMS)
def test_problems_and_scores_are_those_of_reasoning_gym(name: str, params: dict[str, Any]) -> None:
    gym_tasks()  # imports reasoning-gym without its compiled parts
    theirs = importlib.import_module("reasoning_gym").create_dataset(name, seed=11, size=10**6, **params)
    ours, compared = ArithmeticProblems(name, 11, params), 0
    for index in range(400):
        entry = ours[index]
        try:
            wanted = theirs[index]
        except ZeroDivisionError:
            continue
        assert (entry["question"], entry["answer"]) == (wanted["question"], wanted["answer"])
        assert entry["metadata"]["expression"] == wanted["metadata"]["expression"]
        compared += 1
        for answer in (each and each.format(entry["answer"]) for each in ANSWERS):
            assert ours.score_answer(answer, entry) == theirs.score_answer(answer, wanted), answer
    assert compared > 350


def test_without_parentheses_the_answer_is_the_value_of_the_expression() -> None:
    """reasoning-gym computes from left to right: to it, 2 + 3 * 4 is 20."""
    problems = ArithmeticProblems("basic_arithmetic", 0, {"allow_parentheses": False, "max_digits": 1})
    entries = [problems[index] for index in range(300)]
    for entry in entries:
        assert eval(entry["metadata"]["expression"].replace("/", "//")) == int(entry["answer"])
    assert {symbol for entry in entries for symbol in entry["question"]} >= set("+-*/")


def test_an_expression_that_divides_by_zero_is_replaced_and_one_that_always_does_is_refused() -> None:
    zeros = ArithmeticProblems("basic_arithmetic", 1, {"max_terms": 12, "max_digits": 1, "whitespace": "no_space"})
    assert all(zeros[index]["answer"].lstrip("-").isdigit() for index in range(2000))
    with pytest.raises(ZeroDivisionError):
        value("7 / (3 - 3)")


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"min_terms": 0}, "min_terms: Input should be greater than or equal to 1"),
        ({"operators": ["^"]}, "operators: 0: Input should be '+', '-', '*' or '/'"),
        ({"operators": []}, "operators: Tuple should have at least 1 item"),
        ({"max_digits": 0}, "}: max_terms and max_digits must be at least min_terms and min_digits"),
    ],
)
def test_params_that_no_problem_can_have_are_refused(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        GymTask("mine", "basic_arithmetic", params, is_compact=False)
    assert str(caught.value).startswith(f"task 'mine': basic_arithmetic rejects params {params}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


WITHOUT_GYM = """
import importlib.machinery as machinery

find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] == {missing!r} else find(name, *rest)
)
from baton.cli.main import main
from baton.tasks.gym import GymTask

task = GymTask("a", "basic_arithmetic", {{}}, is_compact=True)
problem = task.draw(0, 0)
assert task.score(problem.answer, problem.answer, problem.metadata) == 1.0
assert task.scorer == "inline"
import sys
sys.argv = ["baton", *{words!r}]
main()
"""


@pytest.mark.parametrize(
    ("missing", "words", "sentence"),
    [
        ("reasoning_gym", ["tasks"], "reasoning-gym adds about a hundred tasks: run `pip install 'baton-rl[gym]'`"),
        ("reasoning_gym", ["tasks", "countdown"], "reasoning-gym is not installed: run `pip install 'baton-rl[gym]'`"),
        ("zss", ["tasks", "countdown"], "reasoning-gym needs the module zss: run `pip install 'baton-rl[gym]'`"),
    ],
)
def test_without_reasoning_gym_the_two_tasks_work_and_the_others_say_what_to_install(
    missing: str, words: list[str], sentence: str
) -> None:
    code = WITHOUT_GYM.format(missing=missing, words=words)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=root
    )
    assert sentence in " ".join((done.stdout + done.stderr).split())
    assert ("basic_arithmetic" in done.stdout) == (words == ["tasks"])
    assert "Traceback" not in done.stderr
