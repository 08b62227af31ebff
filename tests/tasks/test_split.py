"""Nobody trains on a held-out problem: not in another wording, stream, run, task or warm start."""

from __future__ import annotations

import importlib
import re
from itertools import islice
from pathlib import Path

import pytest
from task_cases import FOUR, mixture

from baton.errors import TaskExhausted
from baton.recipe.load import load_recipe
from baton.recipe.recipe import WarmStart
from baton.tasks.demonstrations import DemonstrationSettings, demonstrations
from baton.tasks.gym import BLOCK, GymTask, gym_tasks
from baton.tasks.problem import HELD_OUT_PERCENT, Problem
from baton.tasks.problem_forms import canonical_problem
from baton.tasks.stream import PromptStream, TaskMixture

RECIPES = Path(__file__).parents[2] / "recipes"
HELD_OUT = {"chain_sum": 60, "basic_arithmetic": 60, "countdown": 20, "knights_knaves": 15}
TRAINED = {"chain_sum": 400, "basic_arithmetic": 400, "countdown": 60, "knights_knaves": 250}
"""Prompts per stream; countdown takes 8 ms for each."""


@pytest.mark.parametrize("name", FOUR)
def test_no_held_out_problem_is_ever_trained_on_in_either_wording_by_any_run(name: str) -> None:
    compact, original = mixture(name), mixture(name, form="original")
    held_out = {p.prompt_id for p in compact.held_out(HELD_OUT[name])}
    assert {p.prompt_id for p in original.held_out(HELD_OUT[name])} == held_out
    problems: dict[str, set[str]] = {}
    for tasks in (compact, original):
        for seed in (0, 1, 3):
            trained = PromptStream(tasks, seed).take(TRAINED[name])
            assert held_out.isdisjoint(p.prompt_id for p in trained)
            for prompt in trained:
                problems.setdefault(prompt.prompt_id, set()).add(prompt.messages[-1].content)
    if name != "countdown":  # whose problems hardly ever repeat
        assert any(len(wordings) > 1 for wordings in problems.values()), "no problem was seen in two wordings"


@pytest.mark.parametrize("name", FOUR)
def test_the_question_itself_is_never_shared_by_both_sides(name: str) -> None:
    """As a reader would check it, without the digests: the words of held-out questions, names taken out."""

    def words(text: str) -> str:
        return re.sub(r"\s+", " ", text)

    tasks = mixture(name)
    held_out = {words(p.messages[-1].content) for p in tasks.held_out(HELD_OUT[name])}
    trained = {
        words(p.messages[-1].content) for seed in range(3) for p in PromptStream(tasks, seed).take(TRAINED[name])
    }
    assert not held_out & trained


def test_the_same_expression_is_on_the_same_side_in_both_arithmetic_tasks() -> None:
    sides: dict[str, dict[str, bool]] = {}
    for name in ("chain_sum", "basic_arithmetic"):
        task = mixture(name).tasks[name]
        sides[name] = {p.question: p.is_held_out for p in (task.draw(0, i) for i in range(4000))}
    shared = sides["chain_sum"].keys() & sides["basic_arithmetic"].keys()
    assert len(shared) > 50
    assert {sides["chain_sum"][e] for e in shared} == {True, False}
    assert all(sides["chain_sum"][e] == sides["basic_arithmetic"][e] for e in shared)


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "knights_knaves"])
def test_the_split_looks_at_the_problem_and_not_at_reasoning_gyms_additive_seeds(name: str) -> None:
    """Item 2 of seed 1 is item 0 of seed 3, so a split by seeds would leak; one by problems gives both one side."""
    gym_tasks()  # imports reasoning-gym without its compiled parts
    reasoning_gym = importlib.import_module("reasoning_gym")
    streams = {seed: reasoning_gym.create_dataset(name, seed=seed, size=60, **FOUR[name]) for seed in (1, 3)}
    for i in range(50):
        first, second = (
            Problem("", canonical_problem(name, entry), None, {}) for entry in (streams[1][i + 2], streams[3][i])
        )
        assert first.canonical == second.canonical
        assert first.is_held_out == second.is_held_out


def test_blocks_of_one_stream_and_streams_of_two_runs_do_not_repeat_each_other() -> None:
    """With additive seeds, draws of neighbouring seeds would overlap in all but one problem."""
    task = GymTask("chain_sum", "chain_sum", {"min_digits": 6, "max_digits": 6}, is_compact=True)
    draws = {
        (seed, index): task.draw(seed, index).canonical
        for seed in (0, 1, 3)
        for index in (*range(60), *range(BLOCK, BLOCK + 60))
    }
    assert len(set(draws.values())) == len(draws)


def test_knights_and_knaves_are_the_same_puzzle_under_other_names_and_words() -> None:
    task = mixture("knights_knaves", form="original").tasks["knights_knaves"]
    questions: dict[str, set[str]] = {}
    for i in range(1500):
        problem = task.draw(0, i)
        questions.setdefault(problem.canonical, set()).add(problem.question)
    assert len(questions) < 400 < sum(len(q) for q in questions.values())
    assert max(len(q) for q in questions.values()) > 5


def test_countdown_is_the_same_problem_in_another_order_of_numbers() -> None:
    entry = {"question": "", "metadata": {"numbers": [3, 1, 2], "target": 7}}
    other = {"question": "", "metadata": {"numbers": [1, 2, 3], "target": 7}}
    assert canonical_problem("countdown", entry) == canonical_problem("countdown", other)
    other["metadata"]["target"] = 8  # type: ignore[index]
    assert canonical_problem("countdown", entry) != canonical_problem("countdown", other)


def test_knights_and_knaves_is_the_same_puzzle_with_the_people_swapped() -> None:
    """A: "B is a knight", B: "A is a knave or B is a knave"; then the same said by B of A and by A of B."""
    one = [("telling-truth", 1), ("or", ("lying", 0), ("lying", 1))]
    swapped = [("or", ("lying", 1), ("lying", 0)), ("telling-truth", 0)]
    other = [("or", ("lying", 1), ("lying", 0)), ("telling-truth", 1)]
    canonical = [
        canonical_problem("knights_knaves", {"question": "", "metadata": {"statements": statements}})
        for statements in (one, swapped, other)
    ]
    assert canonical[0] == canonical[1]
    assert canonical[2] != canonical[0]


def test_the_held_out_share_is_a_tenth() -> None:
    """Of 20 000 distinct problems 2 000 are expected, standard deviation sqrt(20 000 · 0.1 · 0.9) = 42."""
    count = sum(Problem("", f"file:{i}", None, {}).is_held_out for i in range(20_000))
    assert HELD_OUT_PERCENT == 10
    assert abs(count - 2000) < 5 * 42


def test_warm_starts_never_demonstrate_a_held_out_problem() -> None:
    recipe = load_recipe(WarmStart, RECIPES / "quickstart-warmstart.toml")
    tasks = TaskMixture(recipe.task, recipe.answer)
    held_out = {p.prompt_id for p in tasks.held_out(400)}
    shown = islice(demonstrations(tasks, DemonstrationSettings(), recipe.run.seed), 3000)
    assert held_out.isdisjoint(prompt.prompt_id for prompt, _ in shown)


def test_a_task_with_too_few_held_out_problems_says_how_many_it_has() -> None:
    with pytest.raises(TaskExhausted) as caught:
        mixture("knights_knaves").held_out(60)
    sentence = str(caught.value)
    assert re.search(r"task 'knights_knaves' has only (\d+) distinct held-out problems", sentence)
    assert 8 < int(re.search(r"only (\d+)", sentence)[1]) < 40  # type: ignore[index]  # a tenth of about 205
    assert "60 were requested" in sentence
    assert "\n" not in sentence


def test_a_task_without_any_training_problem_says_so() -> None:
    tasks = mixture("chain_sum")
    problem = next(p for p in (tasks.tasks["chain_sum"].draw(0, i) for i in range(500)) if p.is_held_out)

    class OneProblem:
        name = "chain_sum"

        def draw(self, seed: int, index: int) -> Problem:
            return problem

    tasks.tasks["chain_sum"] = OneProblem()  # type: ignore[assignment]
    with pytest.raises(TaskExhausted, match="task 'chain_sum' gave no training problem in 2000 draws"):
        PromptStream(tasks, 0).take(1)


def test_held_out_prompts_are_distinct_the_same_each_time_and_shared_evenly() -> None:
    names = ("chain_sum", "basic_arithmetic", "knights_knaves")
    prompts = mixture(*names).held_out(50)
    assert prompts == mixture(*names).held_out(50)
    assert len({p.prompt_id for p in prompts}) == 50
    assert [sum(p.task == name for p in prompts) for name in names] == [17, 17, 16]
    assert prompts[:10] == mixture("chain_sum").held_out(10), "more prompts begin with the fewer"
