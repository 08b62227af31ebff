"""Environments of Gymnasium, GEM, SkyRL-gym and TRL run unchanged, each from at most five lines of TOML.

The packages are not among Baton's. Install them elsewhere and name the directory:

    python -m venv /tmp/foreign && /tmp/foreign/bin/pip install gymnasium skyrl-gym bfi pycosat
    /tmp/foreign/bin/pip install --no-deps gem-llm
    BATON_FOREIGN_PACKAGES=$(echo /tmp/foreign/lib/python3*/site-packages) pytest tests/environments/test_foreign.py
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from environment_cases import Turn, play, pool_of, request, results

from baton.environments.calls import EnvironmentSpec, EpisodeKey, Observation, ToolFormat
from baton.environments.settings import EnvironmentSettings
from baton.tasks.environment import EnvironmentTask

pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.timeout(600)]

LAKE = """
[[task]]
name = "lake"
environment = "gymnasium:make"
params = { id = "FrozenLake-v1", render_mode = "ansi", is_slippery = false }
"""
GUESS = """
[[task]]
name = "guess"
environment = "gem.envs.game_env.guess_the_number:GuessTheNumberEnv"
params = { max_number = 4 }
"""
MATH = """
[[task]]
name = "math"
environment = "skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv"
"""
MATH_ROW = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "reward_spec": {"ground_truth": "4"},
    "extra_info": {"max_turns": 3},
}
LIFT = """
[[task]]
name = "lift"
environment = "{file}:Lift"
"""
# The shape that TRL documents for `environment_factory` (grpo_trainer.md, 1.x): `reset` samples the task itself and
# returns the prompt, `get_reward` scores the final state, and public methods are tools.
LIFT_SOURCE = '''
import random


class Lift:
    def reset(self, **kwargs) -> str | None:
        self.floor = 0
        self.wanted = random.randint(1, 6)
        return f"Take the lift to floor {self.wanted}"

    def get_reward(self) -> float:
        return float(self.floor == self.wanted)

    def ride(self, floors: int) -> int:
        """
        Ride the lift.

        Args:
            floors: How many floors to go up.

        Returns:
            The floor on which the lift stops.
        """
        self.floor += floors
        return self.floor
'''


@pytest.fixture
def _foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    places = os.environ.get("BATON_FOREIGN_PACKAGES", "").split(os.pathsep)
    monkeypatch.setattr("sys.path", [*sys.path, *filter(None, places)])


def episode(toml: str, actions: list[str], row: dict[str, Any] | None = None) -> tuple[str, list[Observation]]:
    """The prompt and the observations of an episode, which is also rebuilt from its log in another process."""
    assert len(toml.strip().splitlines()) <= 5
    (section,) = tomllib.loads(toml)["task"]
    spec = EnvironmentSpec(
        section["name"], section["environment"], section.get("params", {}), tool_format=ToolFormat("hermes")
    )
    task = EnvironmentTask(spec, EnvironmentSettings(), [row] if row else ())
    problem = task.draw(0, 0)
    assert problem == task.draw(0, 0)
    task.close()
    fields = {
        "environment": spec.name,
        "seed": problem.metadata["seed"],
        "row": problem.metadata["row"],
        "first_digest": problem.metadata["first_digest"],
    }
    pool = pool_of(spec, processes=1)
    found = [one for one in play(pool, 1, actions, **fields) if isinstance(one, Observation)]
    assert len(found) == len(actions)
    pool.close()
    pool = pool_of(spec, processes=1)
    turns = tuple(Turn(action, one.digest) for action, one in zip(actions, found, strict=True))
    pool.submit(request(1, actions[-1], turns=turns[:-1], **fields))
    (again,) = results(pool, 1).values()
    assert isinstance(again, Observation)
    assert again.digest == found[-1].digest
    pool.discard(EpisodeKey(0, 1, 0))
    pool.close()
    return problem.question, found


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed; see the top of this file")


@pytest.mark.usefixtures("_foreign")
def test_gymnasium() -> None:
    need("gymnasium")
    prompt, found = episode(LAKE, ["1", "1", "2", "2", "1", "I go 2"])  # down, down, right, right, down, right
    assert "FHFH" in prompt
    assert [one.reward for one in found] == [0.0] * 5 + [1.0]
    assert found[-1].is_terminated


@pytest.mark.usefixtures("_foreign")
def test_gem() -> None:
    need("gem")
    prompt, found = episode(GUESS, [f"\\boxed{{{number}}}" for number in (1, 2, 3, 4)][: guesses_needed()])
    assert prompt.startswith("You are playing Guess The Number.")
    assert found[-1].reward == 1.0
    assert found[-1].is_terminated


def guesses_needed() -> int:
    """The number that GEM draws for the seed of the first draw, found by playing until it is guessed."""
    for count in (1, 2, 3, 4):
        _, found = episode(GUESS, [f"\\boxed{{{number}}}" for number in range(1, count + 1)])
        if found[-1].is_terminated:
            return count
    raise AssertionError("the number is between 1 and 4")


@pytest.mark.usefixtures("_foreign")
def test_skyrl_gym() -> None:
    need("skyrl_gym")
    prompt, found = episode(MATH, ["It is five. #### 5", "No: #### 4"], MATH_ROW)
    assert prompt == "2 + 2?"
    assert found[0].text.startswith("Please provide your step-by-step reasoning")
    assert [one.is_terminated for one in found] == [False, True]
    assert found[1].reward == 1.0


def test_a_class_in_the_documented_shape_of_trl(tmp_path: Path) -> None:
    (tmp_path / "lift.py").write_text(LIFT_SOURCE)
    toml = LIFT.format(file=tmp_path / "lift.py")
    spec = EnvironmentSpec("lift", f"{tmp_path}/lift.py:Lift", {}, tool_format=ToolFormat("hermes"))
    task = EnvironmentTask(spec, EnvironmentSettings())
    wanted = int(task.draw(0, 0).question.rpartition(" ")[2])
    task.close()
    call = f'<tool_call>\n{{"name": "ride", "arguments": {{"floors": {wanted}}}}}\n</tool_call>'
    prompt, found = episode(toml, [call, "Done."])
    assert '"name": "ride"' in prompt
    assert found[0].text == str(wanted)
    assert (found[1].reward, found[1].is_terminated) == (1.0, True)
