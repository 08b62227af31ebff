"""reasoning-gym behind `Task`: every task builds and scores, mistakes are one sentence, answers never run as code."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from task_cases import FOUR

from baton.errors import UserError
from baton.tasks.gym import NEEDS_COMPILER, GymTask, gym_tasks, list_tasks

NO_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Any of several solutions is right, so reasoning-gym gives no answer of its own."""
HOSTILE = (
    "",
    "nonsense",
    "1/0",
    "[]",
    "{}",
    "[[1,2],[3,4]]",
    "9" * 400,
    "9**9**9**9",
    "factorial(factorial(20))",
    "1e999999999",
    "(" * 3000,
    "é😀",
    "None",
    "a b\n1 2",
    "__import__('pathlib').Path('{mark}').touch()",
)


def usable_tasks() -> list[str]:
    """All tasks but those whose module wants a C compiler and was therefore not installed."""
    missing = {task for module, task in NEEDS_COMPILER.items() if importlib.util.find_spec(module) is None}
    return [name for name in gym_tasks() if name not in missing]


def test_every_task_builds_gives_the_same_problem_twice_and_gives_its_own_answer_the_full_score() -> None:
    names = usable_tasks()
    assert len(names) >= 103
    without = set()
    for name in names:
        task = GymTask(name, name, {}, is_compact=False)
        problem = task.draw(3, 1)
        assert problem == GymTask(name, name, {}, is_compact=False).draw(3, 1), name
        assert json.loads(json.dumps(problem.metadata)) == problem.metadata, name
        if problem.answer is None:
            without.add(name)
        else:
            assert task.score(problem.answer, problem.answer, problem.metadata) == 1.0, name
        assert task.score(None, problem.answer, problem.metadata) == 0.0, name
    assert without == NO_REFERENCE


@pytest.mark.timeout(120)
def test_no_answer_hangs_a_scorer_or_runs_as_code(tmp_path: Path) -> None:
    """Several scorers evaluate the answer as Python. What one raises at an unreadable answer is the judge's matter."""
    mark = tmp_path / "was-run"
    for name in usable_tasks():
        task = GymTask(name, name, {}, is_compact=False)
        problem = task.draw(0, 0)
        for text in HOSTILE:
            answer = text.replace("{mark}", str(mark))
            try:
                score = task.score(answer, problem.answer, problem.metadata)
            except Exception:  # noqa: BLE001
                continue
            assert 0 <= score <= 1, (name, answer[:20], score)
            assert not mark.exists(), f"{name} ran an answer as code"


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("countdown", ["74*(71 - 59) - 67 - 82"]),
        ("simple_integration", ["7*X**9 + 2*X**5 - 3*X**2/10 + C", "-exp(x)/2 + sin(x)**2 + C"]),
        ("polynomial_multiplication", ["5412*y**5 + 4422*y**4 - 18"]),
        ("spiral_matrix", ["[8, 3, 7]", "8 3 7"]),
        ("n_queens", ["_ _ Q _\nQ _ _ _", "[['_', 'Q'], ['Q', '_']]"]),
        ("string_insertion", ["['A', 'B']", "ABC"]),
        ("coin_flip", ["0.25", "1/4", "4.5e-05"]),
    ],
)
def test_answers_in_the_form_that_a_task_asks_for_reach_its_scorer(name: str, answers: list[str]) -> None:
    from baton.tasks.gym import may_be_scored

    assert all(may_be_scored(name, answer) for answer in answers)


@pytest.mark.parametrize("name", FOUR)
def test_both_wordings_of_a_problem_have_the_same_answer_and_scores_survive_a_new_process(name: str) -> None:
    """A new GymTask knows nothing: the entry is made again from the metadata, which has been through JSON."""
    compact, original = (GymTask(name, name, FOUR[name], is_compact=c) for c in (True, False))
    for index in range(5):
        short, long = compact.draw(1, index), original.draw(1, index)
        assert (short.canonical, short.answer, short.metadata) == (long.canonical, long.answer, long.metadata)
        assert len(short.question) < len(long.question)
        fresh = GymTask(name, name, FOUR[name], is_compact=True)
        assert fresh.score(short.answer, short.answer, json.loads(json.dumps(short.metadata))) == 1.0
        assert fresh.score("0", short.answer, short.metadata) < 1.0 or short.answer == "0"


def test_the_compact_arithmetic_is_the_expression_and_its_value_the_answer() -> None:
    for name in ("chain_sum", "basic_arithmetic"):
        task = GymTask(name, name, FOUR[name], is_compact=True)
        for index in range(100):
            problem = task.draw(0, index)
            assert set(problem.question) <= set("0123456789+-*/()")
            assert eval(problem.question.replace("/", "//")) == int(problem.answer or "")


def test_the_compact_countdown_holds_all_numbers_and_the_target() -> None:
    task = GymTask("countdown", "countdown", FOUR["countdown"], is_compact=True)
    problem = task.draw(0, 0)
    numbers, _, target = problem.question.partition(" -> ")
    for number in numbers.split():
        assert number in (problem.answer or "")
    assert eval(problem.answer or "") == int(target)


@pytest.mark.parametrize(
    ("gym_name", "params", "is_compact", "sentence"),
    [
        ("chain_sums", {}, False, "reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'?"),
        ("qqqqqqqq", {}, False, "reasoning-gym has no task 'qqqqqqqq'; `baton tasks` lists them"),
        ("chain_sum", {"min_term": 2}, False, "rejects params {'min_term': 2}"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, False, "rejects params {'min_terms': 5, 'max_terms': 2}"),
        ("chain_sum", {"min_terms": "two"}, False, "rejects params {'min_terms': 'two'}"),
        ("gsm_symbolic", {}, True, "form = 'compact' is not available for 'gsm_symbolic', only for basic_arithmetic"),
        (
            "knights_knaves",
            {"n_people": 2, "depth_constraint": 1},
            False,
            "knights_knaves cannot generate a problem with params {'n_people': 2, 'depth_constraint': 1}",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence_that_names_the_task(
    gym_name: str, params: dict[str, object], is_compact: bool, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        GymTask("mine", gym_name, params, is_compact=is_compact)
    assert str(caught.value).startswith("task 'mine': ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_seed_and_size_are_not_params_of_a_task() -> None:
    """They belong to the stream; reasoning-gym takes them, so an own sentence is needed."""
    for key in ("seed", "size"):
        with pytest.raises(UserError, match=f"'mine'.*{key}"):
            GymTask("mine", "chain_sum", {key: 3}, is_compact=False)


def test_listed_tasks_have_an_example_their_params_and_no_seed() -> None:
    listed = {task.name: task for task in (list_tasks("chain_sum") + list_tasks("sokoban"))}
    assert listed["chain_sum"].params["min_terms"] == 2
    assert listed["chain_sum"].compact is not None
    assert listed["sokoban"].compact is None
    assert not {"seed", "size"} & listed["chain_sum"].params.keys()
    with pytest.raises(UserError, match="did you mean 'sokoban'"):
        list_tasks("sokobann")


WITHOUT_COMPILED = """
import importlib.machinery as machinery
import sys

find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name in ("bfi", "pycosat") else find(name, *rest)
)
from baton.errors import UserError
from baton.tasks.gym import GymTask, gym_tasks

assert len(gym_tasks()) >= 104
assert GymTask("a", "chain_sum", {}, is_compact=True).draw(0, 0).answer
assert "bfi" not in sys.modules and "pycosat" not in sys.modules
for name in ("bf", "zebra_puzzles"):
    try:
        GymTask("mine", name, {}, is_compact=False)
    except UserError as error:
        print(error)
"""


def test_without_a_compiler_all_tasks_but_two_work_and_those_say_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()
    assert "'bf' needs the module bfi" in first
    assert "pip install bfi" in first
    assert "'zebra_puzzles' needs the module pycosat" in second
    assert "pip install pycosat" in second
