"""Problems of environments: the first observation is the prompt, and rooms that are symmetric are one problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from baton.environments.calls import ActFailure, ActRequest, EnvironmentSpec, EpisodeKey, ToolFormat
from baton.environments.pool import EnvironmentPool
from baton.environments.settings import EnvironmentSettings
from baton.environments.sokoban import Sokoban
from baton.errors import TaskExhausted, UserError
from baton.tasks.environment import SHIPPED, EnvironmentTask
from baton.tasks.stream import TOOLS, AnswerSettings, PromptStream, TaskMixture, TaskSettings
from baton.types import Message

SOURCE = """
import os
from pathlib import Path


class Echo:
    instructions = "Repeat."

    def __init__(self, prefix=""):
        self.prefix = prefix

    def reset(self, *, seed, word="none"):
        if word == "bad":
            raise KeyError(word)
        if word.startswith("/") and not Path(word).exists():
            Path(word).touch()
            raise ConnectionError("the server is busy")
        return f"{self.prefix}{word}"

    def step(self, action):
        return str(os.getpid()), 1.0, True, False, {}
"""


def sokoban(**args: Any) -> EnvironmentTask:
    return EnvironmentTask(EnvironmentSpec("rooms", SHIPPED["sokoban"], args), EnvironmentSettings())


def test_a_draw_is_a_function_of_seed_and_index_and_its_canonical_form_is_that_of_the_room() -> None:
    task = sokoban()
    first = task.draw(1, 7)
    assert first == sokoban().draw(1, 7)
    assert first.question != task.draw(1, 8).question
    assert first.question != task.draw(2, 7).question
    assert first.messages is not None
    assert first.messages[0].content.startswith("You are solving the Sokoban puzzle.")
    assert first.messages[0].content.endswith("You have 25 actions left.")
    assert first.metadata["seed"] == 4181277356, "a rename changes no seed"
    environment = Sokoban()
    environment.reset(seed=first.metadata["seed"])
    assert first.canonical == environment.canonical()


def test_a_tenth_of_the_rooms_is_held_out_and_no_symmetric_room_is_trained_on() -> None:
    task = sokoban(form="compact")
    problems = [task.draw(1, index) for index in range(600)]
    held_out = {problem.canonical for problem in problems if problem.is_held_out}
    trained = {problem.canonical for problem in problems if not problem.is_held_out}
    assert not held_out & trained
    assert 0.04 < len(held_out) / len(held_out | trained) < 0.18


def test_a_conversation_is_the_prompt_as_it_is() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Compute 2+2."}]
    args = {"tools": ["baton.environments.code:run_python"]}
    spec = EnvironmentSpec("tools", TOOLS, args, tool_format=ToolFormat("hermes"))
    task = EnvironmentTask(spec, EnvironmentSettings(processes=1), rows=[{"prompt": turns}])
    messages = task.draw(1, 0).messages
    task.close()
    assert messages is not None
    assert messages[0] == Message("system", "Be brief.")
    assert messages[1].role == "user"
    assert messages[1].content.endswith("Compute 2+2.")
    assert len(messages) == 2


def test_a_reset_that_fails_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    spec = EnvironmentSpec("mine", f"{tmp_path}/mine.py:Echo", {})
    rows = [{"word": f"{tmp_path}/busy"}, {"word": "bad"}]
    task = EnvironmentTask(spec, EnvironmentSettings(allow_network=True), rows=rows)
    try:
        assert task.draw(1, 0).question == f"Repeat.\n\n{tmp_path}/busy"
        with pytest.raises(UserError, match=r"KeyError.* with seed \d+, row 1 of the dataset"):
            task.draw(1, 3)
    finally:
        task.close()


@pytest.mark.timing
def test_a_users_class_is_reset_in_a_process_and_acts_on_the_state_that_the_prompt_shows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    spec = EnvironmentSpec("mine", f"{tmp_path}/mine.py:Echo", {"prefix": "say "})
    task = EnvironmentTask(spec, EnvironmentSettings(), rows=[{"word": "one"}, {"word": "two"}, {"word": "bad"}])
    problems = [task.draw(1, index) for index in (0, 1, 3)]
    assert [problem.question for problem in problems] == [f"Repeat.\n\nsay {word}" for word in ("one", "two", "one")]
    assert problems[0].problem_id == problems[2].problem_id
    with pytest.raises(UserError, match=r"task 'mine': the environment failed on a reset: .*KeyError"):
        task.draw(1, 2)
    task.close()
    pool = EnvironmentPool({"mine": spec}, EnvironmentSettings(processes=1))
    values = problems[0].metadata
    for number, digest in enumerate((values["first_digest"], problems[1].metadata["first_digest"])):
        key = EpisodeKey(0, number, 0)
        pool.submit(ActRequest(key, "mine", values["seed"], values["row"], action="x", first_digest=digest))
        found = pool.collect(120.0)
        assert isinstance(found[0], ActFailure) == bool(number), "the second has the digest of another prompt"
    pool.close()


def test_an_environment_whose_problems_look_equal_is_told_what_distinguishes_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    tasks = TaskMixture([TaskSettings(name="mine", environment=f"{tmp_path}/mine.py:Echo")], AnswerSettings())
    is_held_out = tasks.tasks["mine"].draw(0, 0).is_held_out
    try:
        with pytest.raises(TaskExhausted, match="give the environment a method `canonical`"):
            PromptStream(tasks, seed=1).take(1) if is_held_out else tasks.held_out(1)
    finally:
        tasks.close()


def test_a_column_that_has_the_name_of_the_seed_is_refused() -> None:
    spec = EnvironmentSpec("mine", "mine.py:Echo", {})
    with pytest.raises(UserError, match="task 'mine': the dataset has a column 'seed', but Baton passes its own seed"):
        EnvironmentTask(spec, EnvironmentSettings(), rows=[{"word": "one"}, {"word": "two", "seed": 7}])


def test_a_class_becomes_a_path_unless_it_cannot_be_imported() -> None:
    task = TaskSettings(name="a", environment=Sokoban)  # type: ignore[arg-type]
    assert task.environment == "baton.environments.sokoban:Sokoban"

    class Local: ...

    with pytest.raises(ValidationError, match="cannot be imported by another process; define it at the top level"):
        TaskSettings(name="a", environment=Local)  # type: ignore[arg-type]
