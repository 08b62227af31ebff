"""Classes in the shapes of other projects run unchanged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from environment_cases import request, turns_of

from baton.environments.adapters import load_environment
from baton.environments.calls import ActFailure, EnvironmentSpec, Observation, ToolFormat, digest_of
from baton.environments.instances import EnvironmentInstances
from baton.errors import UserError

pytestmark = pytest.mark.timeout(300)


class Space:
    n, start = 3, 0


class Walk:
    """As a Gymnasium environment with text rendering."""

    action_space = Space()
    render_mode = "ansi"

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[list[int], dict]:  # type: ignore[type-arg]
        self.at = (options or {}).get("at", 0)
        return [self.at], {}

    def step(self, action: int) -> tuple[list[int], float, bool, bool, dict[str, Any]]:
        assert isinstance(action, int)
        self.at += action
        return [self.at], float(self.at >= self.length), self.at >= self.length, False, {"success": True}

    def render(self) -> str:
        return "." * self.at + "@"


class Guess:
    """As a GEM environment: texts, and the global random state."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        return f"guess {random.randint(0, 10**6)}", {"suffix": "?"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"{action} {random.randint(0, 10**6)}", 0.5, False, False, {"suffix": "?"}


class SkyRL:
    """As a SkyRL-gym environment."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        self.truth = (extras or {})["reward_spec"]["ground_truth"]

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        done = action == self.truth
        observations = [] if done else [{"role": "user", "content": "no"}]
        return {"observations": observations, "reward": float(done), "done": done, "metadata": {"tries": 1}}


class Bank:
    """As a class for TRL's `environment_factory`."""

    def reset(self, **kwargs: Any) -> str | None:
        self.balance = kwargs["start"]
        return f" You have {self.balance}. Lucky number: {random.randint(0, 10**6)}."

    def deposit(self, amount: int) -> int:
        """
        Add to the balance.

        Args:
            amount: How much.

        Returns:
            The new balance.
        """
        self.balance += amount
        return self.balance

    async def get_reward(self) -> float:
        return self.balance / 10


class Canonical:
    """Tells problems apart whose first observations may be equal."""

    def canonical(self) -> str:
        return "the hidden word"


class HiddenGuess(Canonical, Guess): ...


class WrappedGuess:
    """Like a wrapper of Gymnasium 1.0, which has no other methods of its environment."""

    def __init__(self) -> None:
        self.unwrapped = HiddenGuess()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self.unwrapped.reset(seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.unwrapped.step(action)


class HiddenSkyRL(Canonical, SkyRL): ...


class HiddenBank(Canonical, Bank): ...


class Nothing:
    """No known shape."""


def made(cls: str, **args: Any) -> EnvironmentInstances:
    spec = EnvironmentSpec("counter", f"{Path(__file__).resolve()}:{cls}", args, tool_format=ToolFormat("hermes"))
    return EnvironmentInstances({"counter": load_environment(spec)}, 1000)


def test_gymnasium() -> None:
    walk = made("Walk", length=4)
    reset = walk.act(request(1, None, row={"at": 1}))
    assert isinstance(reset, Observation)
    assert reset.text == ".@"
    wrong = walk.act(request(1, "I walk", row={"at": 1}))
    assert isinstance(wrong, Observation)
    assert wrong.text == "The action is not valid: write an integer from 0 to 2.\n.@"
    endless = walk.act(request(2, "9" * 5000, row={"at": 1}))  # more digits than Python converts
    assert isinstance(endless, Observation)
    assert endless.text == wrong.text
    log = turns_of("I walk", wrong)
    moved = walk.act(request(1, "first 1, no: 2", turns=log, row={"at": 1}))
    assert isinstance(moved, Observation)
    assert (moved.text, moved.reward, moved.is_terminated) == ("...@", 0.0, False)
    ended = walk.act(request(1, "1", turns=log + turns_of("first 1, no: 2", moved), row={"at": 1}))
    assert isinstance(ended, Observation)
    assert (ended.text, ended.reward, ended.is_terminated, ended.is_success) == ("....@", 1.0, True, True)


def test_gem_with_the_global_random_state_is_the_same_whatever_runs_beside_it() -> None:
    alone, beside = made("Guess"), made("Guess")
    log: tuple[Any, ...] = ()
    texts = []
    for _ in range(5):
        found = alone.act(request(1, "x", turns=log))
        log += turns_of("x", found)
        texts.append(found)
    log = ()
    for number in range(5):
        other = beside.act(request(2, "y", turns=()))
        assert isinstance(other, Observation)
        beside.discard(other.key)
        found = beside.act(request(1, "x", turns=log))
        log += turns_of("x", found)
        expected = texts[number]
        assert isinstance(found, Observation)
        assert isinstance(expected, Observation)
        assert found.text == expected.text


def test_skyrl_gym() -> None:
    sky = made("SkyRL")
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "reward_spec": {"ground_truth": "4"}}
    first = sky.act(request(1, None, row=row))
    assert isinstance(first, Observation)
    assert first.text == "2+2?"
    second = sky.act(request(1, "5", row=row))
    assert isinstance(second, Observation)
    assert (second.text, second.reward, second.metrics) == ("no", 0.0, {"tries": 1.0})
    third = sky.act(request(1, "4", turns=turns_of("5", second), row=row))
    assert isinstance(third, Observation)
    assert (third.text, third.reward, third.is_terminated) == ("", 1.0, True)


@pytest.mark.parametrize("cls", ["SkyRL", "Bank"])
def test_a_conversation_as_prompt_keeps_its_roles(cls: str) -> None:
    system, shot = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}
    turns = [system, shot, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2?"}]
    row = {"prompt": turns, "reward_spec": {"ground_truth": "4"}, "start": 3}
    first = made(cls).act(request(1, None, row=row))
    assert isinstance(first, Observation)
    assert [{"role": m.role, "content": m.content} for m in first.earlier] == turns[:3]
    assert first.text.startswith("2+2?")
    # as in earlier versions, whose runs are resumed
    assert first.canonical == "\n\n".join(["Be brief.", "1+1?", "2", first.text])
    assert first.digest == digest_of(first.canonical, 0.0, False, False)


@pytest.mark.parametrize("cls", ["HiddenGuess", "WrappedGuess", "HiddenSkyRL", "HiddenBank"])
def test_the_canonical_form_that_a_class_of_another_project_gives_is_used(cls: str) -> None:
    row = {} if cls.endswith("Guess") else {"prompt": "Guess.", "reward_spec": {"ground_truth": "4"}, "start": 3}
    first = made(cls).act(request(1, None, row=row))
    assert isinstance(first, Observation)
    assert first.canonical == "the hidden word"
    assert "canonical" not in first.instructions


def test_trl() -> None:
    bank = made("Bank")
    row = {"prompt": [{"role": "user", "content": "Get to 10."}], "start": 3}
    first = bank.act(request(1, None, row=row))
    assert isinstance(first, Observation)
    assert first.text.startswith("Get to 10. You have 3. Lucky number: ")
    again = made("Bank").act(request(1, None, row=row))
    assert isinstance(again, Observation)
    assert again.text == first.text, "the global random state is that of the seed"
    assert '"name": "deposit"' in first.instructions
    assert "get_reward" not in first.instructions
    call = '<tool_call>{"name": "deposit", "arguments": {"amount": 7}}</tool_call>'
    second = bank.act(request(1, call, row=row))
    assert isinstance(second, Observation)
    assert (second.text, second.tool, second.reward) == ("10", "deposit", 0.0)
    third = bank.act(request(1, "Done.", turns=turns_of(call, second), row=row))
    assert isinstance(third, Observation)
    assert (third.reward, third.is_terminated, third.is_success) == (1.0, True, True)


def test_trl_in_the_format_of_the_model_and_with_the_turns_of_the_task() -> None:
    row = {"prompt": [{"role": "user", "content": "Get to 10."}], "start": 3}
    path = f"{Path(__file__).resolve()}:Bank"
    shown = EnvironmentSpec("counter", path, tool_format=ToolFormat("llama3", is_rendered=True), max_turns=1)
    bank = EnvironmentInstances({"counter": load_environment(shown)}, 1000)
    first = bank.act(request(1, None, row=row))
    assert isinstance(first, Observation)
    assert first.instructions == ""
    assert [one["function"]["name"] for one in first.tools] == ["deposit"], "for the chat template"
    last = bank.act(request(1, '{"name": "deposit", "parameters": {"amount": 2}}', row=row))
    assert isinstance(last, Observation)
    assert (last.text, last.reward, last.is_truncated, last.is_success) == ("5", 0.5, True, False)
    with pytest.raises(UserError, match="environment 'counter': the model's chat template writes tool calls in an"):
        load_environment(EnvironmentSpec("counter", path))
    load_environment(EnvironmentSpec("counter", path, {"family": "hermes"}))


def test_a_class_of_no_known_shape_is_refused_with_the_shapes() -> None:
    with pytest.raises(UserError, match=r"has none of the known shapes: reset and step \(Baton, Gymnasium, GEM\)"):
        made("Nothing")
    with pytest.raises(UserError, match="replay is 'sometimes'; allowed are 'log' and 'never'"):
        load_environment(EnvironmentSpec("a", f"{__file__}:Guess", {}, replay="sometimes"))  # type: ignore[arg-type]


def test_a_constructor_that_raises_is_a_failure_of_the_reset() -> None:
    found = made("Walk").act(request(1, None))
    assert isinstance(found, ActFailure)
    assert "reset raised TypeError" in found.message
