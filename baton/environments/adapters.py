"""Adapts environments of other projects, which are recognised by their methods and used unchanged.

| shape            | recognised by                            | source                                        |
|------------------|------------------------------------------|-----------------------------------------------|
| Baton            | `reset(*, seed, ...)` and `step(action)` | `environment.py`                              |
| Gymnasium, GEM   | `reset(seed=None, ...)` and `step`       | `reset` returns (observation, info)           |
| SkyRL-gym        | `init(prompt)` and `step(action)`        | `step` returns a dict with `observations`     |
| TRL              | `reset` and further public methods       | `environment_factory`: the methods are tools  |
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from baton.environments.calls import EnvironmentSpec
from baton.environments.environment import Environment, Replay
from baton.environments.tools import (
    ConversationPrompt,
    ToolEnvironment,
    accepted_by,
    prompt_text,
    split_prompt,
    with_success,
)
from baton.errors import UserError
from baton.rewards.functions import describe_error, import_function

Step = tuple[str, float, bool, bool, dict[str, Any]]
Serial = Literal["nothing", "reset", "all"]


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An environment that can be instantiated in this process."""

    make: Callable[[], Environment]
    replay: Replay = "log"
    note: str = ""
    """Line for the user, returned by the class's `prepare`."""
    serial: Serial = "nothing"
    """Which calls run one at a time in a process: no calls, only `reset`, or all calls. Classes of other projects may
    use the global random state of Python and numpy. With `reset` or `all`, this state is therefore seeded before each
    call to `reset`. With `all`, each episode also has a random state of its own, which is restored before each call and
    saved after it."""


def load_environment(spec: EnvironmentSpec) -> LoadedEnvironment:
    """Import an environment and recognise its shape. Raises UserError if this fails."""
    factory = import_function(spec.path, what=f"environment {spec.name!r}:")
    kind: Any = factory if inspect.isclass(factory) else type(_probe(factory, spec))
    replay: Replay = getattr(kind, "replay", "log") if spec.replay is None else spec.replay
    if replay not in ("log", "never"):
        raise UserError(f"environment {spec.name!r}: replay is {replay!r}; allowed are 'log' and 'never'")
    args = dict(spec.args)
    if _has(kind, "init") and _has(kind, "step"):
        return LoadedEnvironment(lambda: _SkyRL(factory, args), replay, serial="reset")
    if _has(kind, "reset") and _has(kind, "step"):
        seed = inspect.signature(kind.reset).parameters.get("seed")
        if seed is not None and seed.default is inspect.Parameter.empty:
            note = kind.prepare(**args) if _has(kind, "prepare") else ""
            if issubclass(kind, ToolEnvironment):
                return _with_tools(lambda: factory(**args), spec, replay, "nothing", note)
            return LoadedEnvironment(lambda: cast(Environment, factory(**args)), replay, note)
        return LoadedEnvironment(lambda: _Gymnasium(factory(**args)), replay, serial="all")
    if _has(kind, "reset") and public_methods(kind):
        family = args.pop("family", None)
        return _with_tools(lambda: _TRL(factory(**args), family), spec, replay, "reset")
    raise UserError(
        f"environment {spec.name!r}: {spec.path!r} has none of the known shapes: reset and step (Baton, Gymnasium, "
        "GEM), init and step (SkyRL-gym), or reset and tool methods (TRL)"
    )


def _with_tools(
    make: Callable[[], ToolEnvironment], spec: EnvironmentSpec, replay: Replay, serial: Serial, note: str = ""
) -> LoadedEnvironment:
    """Load an environment with tools. Raises UserError if the tools' schemas or the format of calls cannot be
    derived."""

    def make_configured() -> ToolEnvironment:
        environment = make()
        environment.configure(spec)
        return environment

    try:
        _closed(make_configured())
    except UserError as error:
        raise UserError(f"environment {spec.name!r}: {error}") from error
    return LoadedEnvironment(make_configured, replay, note, serial)


def public_methods(kind: type) -> list[str]:
    """Return the names of the methods that are tools of a TRL environment."""
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    others = ("reset", "get_reward", "canonical", "close")
    return [name for name in names if not name.startswith("_") and name not in others]


def _probe(factory: Callable[..., Any], spec: EnvironmentSpec) -> Any:
    try:
        instance = factory(**spec.args)
    except Exception as error:
        raise UserError(f"environment {spec.name!r}: {spec.path!r} raised {describe_error(error)}") from error
    return _closed(instance)


def _closed(instance: Any) -> Any:
    if callable(close := getattr(instance, "close", None)):
        close()
    return instance


def _has(kind: type, method: str) -> bool:
    return callable(getattr(kind, method, None))


class _Gymnasium:
    """Adapts Gymnasium and GEM: observations become text; a discrete action is the last integer in a turn."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._is_discrete = hasattr(getattr(inner, "action_space", None), "n")
        self._text = ""
        self.close = getattr(inner, "close", lambda: None)
        # wrappers of Gymnasium 1.0 have no methods of the environment that they wrap
        self.canonical = getattr(inner, "canonical", None) or getattr(
            getattr(inner, "unwrapped", None), "canonical", None
        )

    def reset(self, *, seed: int, **row: Any) -> str:
        accepted = inspect.signature(self._inner.reset).parameters
        arguments = {"options": row} if row and "options" in accepted else row
        result = self._inner.reset(**({"seed": seed} if "seed" in accepted else {}), **arguments)
        return self._shown(result[0] if isinstance(result, tuple) else result)

    def step(self, action: str) -> Step:
        chosen: str | int = action
        if self._is_discrete:
            first = int(getattr(self._inner.action_space, "start", 0))
            last = first + int(self._inner.action_space.n) - 1
            numbers = re.findall(r"-?\d+", action)
            # int() raises ValueError for thousands of digits
            if not numbers or len(numbers[-1]) > 20 or not first <= int(numbers[-1]) <= last:
                allowed = f"The action is not valid: write an integer from {first} to {last}."
                return f"{allowed}\n{self._text}", 0.0, False, False, {"is_valid": False}
            chosen = int(numbers[-1])
        observation, reward, is_terminated, is_truncated, info = self._inner.step(chosen)
        return self._shown(observation), reward, is_terminated, is_truncated, info

    def _shown(self, observation: Any) -> str:
        if not isinstance(observation, str):
            is_drawn = getattr(self._inner, "render_mode", None) == "ansi"
            observation = self._inner.render() if is_drawn else observation
        self._text = str(observation)
        return self._text


class _SkyRL(ConversationPrompt):
    """Adapts SkyRL-gym: the constructor receives the row as `extras`, and `init` receives the row's `prompt`."""

    def __init__(self, factory: Callable[..., Any], args: dict[str, Any]) -> None:
        self._factory, self._args = factory, args

    def reset(self, *, seed: int, **row: Any) -> str:
        accepted = inspect.signature(self._factory).parameters
        self._inner = self._factory(**self._args, **({"extras": row} if "extras" in accepted else {}))
        self.canonical = getattr(self._inner, "canonical", None)
        prompt = row.get("prompt", "")
        messages, _ = self._inner.init([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        self.earlier_messages, text = split_prompt(messages)
        return text

    def step(self, action: str) -> Step:
        found = self._inner.step(action)
        return prompt_text(found["observations"]), found["reward"], found["done"], False, found.get("metadata") or {}

    def close(self) -> None:
        self._inner.close()


class _TRL(ToolEnvironment):
    """Adapts TRL's `environment_factory`: `reset` receives the row and returns text that is appended to the prompt."""

    def __init__(self, inner: Any, family: str | None) -> None:
        super().__init__([getattr(inner, name) for name in public_methods(type(inner))], family=family)
        self._inner = inner
        self.close = getattr(inner, "close", lambda: None)
        self.canonical = getattr(inner, "canonical", None)

    def reset(self, *, seed: int, **row: Any) -> str:
        takes_seed = "seed" in inspect.signature(self._inner.reset).parameters
        text = self._inner.reset(**accepted_by(self._inner.reset, {"seed": seed, **row} if takes_seed else row))
        self.earlier_messages, asked = split_prompt(row.get("prompt", ""))
        return asked + ("" if text is None else str(text))

    def score(self, response: str) -> tuple[float, dict[str, Any]]:
        get_reward = getattr(self._inner, "get_reward", None)
        return (0.0, {}) if get_reward is None else with_success(get_reward())
