"""Test sets: which problems evaluations use, and that none of them is ever trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.errors import TaskExhausted, UserError
from baton.tasks.prompt_lengths import measure
from baton.tasks.stream import AnswerSettings, EvalTaskSettings, PromptStream, TaskMixture, TaskSettings

PLAIN = AnswerSettings(instruct=False)


def rows(path: Path, numbers: range) -> str:
    path.write_text("".join(json.dumps({"question": f"What is {i} + 1?", "answer": i + 1}) + "\n" for i in numbers))
    return str(path)


def asked(prompts: object) -> list[int]:
    return [int(p.messages[-1].content.split()[2]) for p in prompts]  # type: ignore[attr-defined]


def mixture(tmp_path: Path, *, train: dict[str, object] | None = None, **test: object) -> TaskMixture:
    """A hundred rows to train on, and a test set of thirty, ten of which are in both."""
    task = TaskSettings(name="train", path=rows(tmp_path / "train.jsonl", range(100)), **(train or {}))
    own = EvalTaskSettings(name="test", path=rows(tmp_path / "test.jsonl", range(90, 120)), **test)
    return TaskMixture([task], PLAIN, tests=[own])


def test_every_row_of_a_test_set_is_used_once_and_in_the_same_order_each_time(tmp_path: Path) -> None:
    found = asked(mixture(tmp_path).held_out(4, or_fewer=True))  # eval.num_prompts is no limit for a file
    assert sorted(found) == list(range(90, 120))
    assert found == asked(mixture(tmp_path).held_out(4, or_fewer=True))
    assert asked(mixture(tmp_path, num_prompts=7).held_out(4, or_fewer=True)) == found[:7]
    assert asked(mixture(tmp_path).held_out(4)) == found[:4]  # baton eval -n 4
    assert asked(mixture(tmp_path, num_prompts=7).held_out(100)) == found[:7]


def test_no_problem_of_a_test_set_is_trained_on(tmp_path: Path) -> None:
    for share, expected in ((None, range(90)), (5, range(90))):
        tasks = mixture(tmp_path, train={"held_out": "none"}, num_prompts=share)
        assert set(asked(PromptStream(tasks, seed=1).take(90 * 3))) == set(expected)


@pytest.mark.parametrize("evaluated", [None, 2, 20])
def test_no_episode_of_a_test_set_is_trained_on_whatever_evaluations_use(tmp_path: Path, evaluated: int | None) -> None:
    """Ten of the thirty programming problems to train on are among the twenty of the test set."""

    def problems(name: str, numbers: range) -> str:
        lines = [json.dumps({"prompt": f"Return {i} + 1.", "tests": [[[], i + 1]]}) for i in numbers]
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    keys = {"environment": "code", "params": {"allow_unisolated": True}}
    task = TaskSettings(name="train", path=problems("train.jsonl", range(30)), **keys)
    test = EvalTaskSettings(name="test", path=problems("test.jsonl", range(20, 40)), num_prompts=evaluated, **keys)
    tasks = TaskMixture([task], PLAIN, tests=[test])
    if evaluated is not None:
        assert len(tasks.held_out(4, or_fewer=True)) == evaluated
    prompts = PromptStream(tasks, seed=1).take(90)
    trained = {int(p.messages[-1].content.partition("Return ")[2].split()[0]) for p in prompts}
    assert trained <= set(range(20))
    assert len(trained) > 10


def test_rows_that_an_environment_shows_as_one_problem_are_no_test_set(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "Guess.", "tests": [[[], i]]}) for i in range(3)))
    test = EvalTaskSettings(name="test", path=str(file), environment="code", params={"allow_unisolated": True})
    with pytest.raises(UserError, match=r"test set 'test': its 3 rows are one problem, because .* `canonical`"):
        TaskMixture([], PLAIN, tests=[test]).held_out(4, or_fewer=True)


def test_a_task_still_holds_out_its_tenth_unless_it_says_none(tmp_path: Path) -> None:
    trained = set(asked(PromptStream(mixture(tmp_path), seed=1).take(400)))
    tenth = {i for i in range(100) if i not in trained}
    assert set(range(90, 100)) < tenth
    own = {asked([p])[0] for p in mixture(tmp_path, held_out="hash").held_out(64, or_fewer=True)}
    assert own & set(range(90, 100)) == own - set(range(100, 120))
    alone = TaskMixture([TaskSettings(name="train", path=rows(tmp_path / "train.jsonl", range(100)))], PLAIN)
    assert set(asked(alone.held_out(64, or_fewer=True))) | set(range(90, 100)) == tenth


def test_the_tenth_of_the_same_file_is_a_test_set(tmp_path: Path) -> None:
    path = rows(tmp_path / "train.jsonl", range(100))
    alone = TaskMixture([TaskSettings(name="a", path=path)], PLAIN)
    same = TaskMixture(
        [TaskSettings(name="a", path=path, held_out="none")],
        PLAIN,
        tests=[EvalTaskSettings(name="b", path=path, held_out="hash")],
    )
    assert asked(same.held_out(64, or_fewer=True)) == asked(alone.held_out(64, or_fewer=True))
    assert asked(PromptStream(same, seed=3).take(50)) == asked(PromptStream(alone, seed=3).take(50))


def test_a_generated_test_set_is_the_tenth_of_its_problems() -> None:
    own = EvalTaskSettings(name="harder", gym="chain_sum", params={"min_terms": 4, "max_terms": 4})
    tasks = TaskMixture([TaskSettings(name="chain_sum", params={"max_terms": 3})], PLAIN, tests=[own])
    prompts = tasks.held_out(12, or_fewer=True)
    assert len(prompts) == 12
    assert {p.task for p in prompts} == {"harder"}
    other = TaskMixture([TaskSettings(name="chain_sum", params={"min_terms": 4, "max_terms": 4})], PLAIN)
    assert {p.prompt_id for p in other.held_out(12)} == {p.prompt_id for p in prompts}


def test_test_sets_may_share_problems_and_have_their_own_number_of_samples_and_format(tmp_path: Path) -> None:
    path = rows(tmp_path / "test.jsonl", range(5))
    tests = [
        EvalTaskSettings(name="a", path=path, samples=4),
        EvalTaskSettings(name="b", path=path, answer=AnswerSettings(format="boxed")),
    ]
    tasks = TaskMixture([], PLAIN, tests=tests)
    prompts = tasks.held_out(256, or_fewer=True)
    assert [p.task for p in prompts] == ["a"] * 5 + ["b"] * 5
    assert tasks.samples == {"a": 4}
    assert {p.task: [m.role for m in p.messages] for p in prompts} == {"a": ["user"], "b": ["system", "user"]}


def test_a_training_task_whose_rows_are_all_tested_says_so(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", range(10))
    tasks = TaskMixture([TaskSettings(name="a", path=path)], PLAIN, tests=[EvalTaskSettings(name="b", path=path)])
    with pytest.raises(TaskExhausted, match=r"gave no training problem in .* other problems than the test sets"):
        PromptStream(tasks, seed=0).take(1)


def test_lengths_are_measured_for_test_sets_and_a_task_may_have_a_lower_limit(tmp_path: Path) -> None:
    tasks = mixture(tmp_path, train={"max_prompt_tokens": 3}, max_prompt_tokens=9)
    train, test = measure(tasks, lambda prompt: len(prompt.messages[-1].content.split()), 6, seed=0)
    assert (train.task, train.rows, train.max_tokens, train.too_long) == ("train", 100, 3, 100)
    assert (test.task, test.rows, test.held_out, test.max_tokens, test.too_long) == ("test", 30, 30, 5, 0)
    assert train.held_out is not None
    assert train.held_out >= 10  # the ten rows of the test set, and the tenth
    assert len(tasks.held_out(1, or_fewer=True)) == 30
    with pytest.raises(TaskExhausted, match="its prompts are too long"):
        PromptStream(tasks, seed=0).take(1)


def test_names_are_unique_over_tasks_and_test_sets(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", range(10))
    with pytest.raises(UserError, match="the name 'a' is used twice"):
        TaskMixture([TaskSettings(name="a", path=path)], PLAIN, tests=[EvalTaskSettings(name="a", path=path)])
    with pytest.raises(UserError, match=r"has no \[\[task\]\]"):
        TaskMixture([], PLAIN)
    with pytest.raises(ValueError, match='got "none", which applies only to a task with a path'):
        TaskSettings(name="chain_sum", held_out="none")
