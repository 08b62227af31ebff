"""The open episodes of one process: executes turns, and rebuilds episodes from their logs. Knows no deadlines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from baton.environments.calls import ActFailure, ActRequest, EnvironmentSpec, EpisodeKey, Observation, digest_of
from baton.environments.environment import Environment, Replay
from baton.errors import UserError
from baton.rewards.functions import describe_error, import_function, number
from baton.rewards.scorer_protocol import CallFailure
from baton.types import FailureCause

MAX_METRICS = 32
"""Numbers of one `info` that become metrics."""


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An environment that can be instantiated in this process."""

    make: Callable[[], Environment]
    replay: Replay


def load_environment(spec: EnvironmentSpec) -> LoadedEnvironment:
    """Import the class of a spec. Raises UserError in one sentence."""
    factory = import_function(spec.path, what=f"environment {spec.name!r}:")
    replay = spec.replay or getattr(factory, "replay", "log")
    if replay not in ("log", "never"):
        raise UserError(f"environment {spec.name!r}: replay is {replay!r}; allowed are 'log' and 'never'")
    return LoadedEnvironment(lambda: factory(**spec.args), replay)


@dataclass(slots=True)
class _Instance:
    environment: Environment
    actions: list[str] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    """[actions + 1] the first is that of the reset."""


class _Failed(Exception):
    def __init__(self, cause: FailureCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class EnvironmentInstances:
    """Executes requests. Requests of different episodes may run in different threads at once."""

    def __init__(self, environments: Mapping[str, LoadedEnvironment], max_observation_chars: int) -> None:
        self._environments = environments
        self._max_chars = max_observation_chars
        self._instances: dict[EpisodeKey, _Instance] = {}
        self.called_at: dict[EpisodeKey, float] = {}
        """Monotonic time at which the running call of `reset` or `step` began, by episode."""

    def act(self, request: ActRequest) -> Observation | ActFailure:
        """Execute a request. All errors of the environment become failures."""
        try:
            return self._act(request)
        except _Failed as failed:
            self.discard(request.key)
            return ActFailure(request.key, len(request.actions), failed.cause, str(failed))
        except Exception as error:  # noqa: BLE001 - such as a value whose conversion to a string raises
            self.discard(request.key)
            return ActFailure(request.key, len(request.actions), FailureCause.RAISED, describe_error(error))
        finally:
            self.called_at.pop(request.key, None)

    def discard(self, key: EpisodeKey) -> None:
        """Close the instance of an episode, if there is one."""
        instance = self._instances.pop(key, None)
        if close := getattr(instance and instance.environment, "close", None):
            with suppress(Exception):
                close()

    def canonical(self, key: EpisodeKey) -> str:
        """Return the canonical form of a problem after its reset. Raises UserError if the environment fails."""
        instance = self._instances[key]
        method = getattr(instance.environment, "canonical", None)
        return instance.observations[0].text if method is None else str(method())

    def _act(self, request: ActRequest) -> Observation:
        wanted = request.actions
        instance = self._instances.get(request.key)
        if instance is not None and instance.actions[: len(wanted)] == wanted:
            return instance.observations[len(wanted)]
        if instance is None or instance.actions != wanted[: len(request.log)]:
            instance = self._rebuild(request, is_replaced=instance is not None)
        if request.action is not None:
            self._step(request.key, instance, request.action)
        return instance.observations[-1]

    def _rebuild(self, request: ActRequest, *, is_replaced: bool) -> _Instance:
        loaded = self._environments[request.environment]
        if loaded.replay == "never" and (request.log or is_replaced):
            what = "has executed other actions" if is_replaced else "is gone"
            raise _Failed(
                FailureCause.CRASHED, f"the environment's instance {what} and replay = 'never' forbids another"
            )
        self.discard(request.key)
        self.called_at[request.key] = time.monotonic()
        began_s = time.perf_counter()
        try:
            environment = loaded.make()
            text = environment.reset(seed=request.seed, **request.row)
        except BaseException as error:
            raise _Failed(FailureCause.RAISED, f"reset raised {describe_error(error)}") from error
        instance = _Instance(environment)
        self._instances[request.key] = instance
        self._record(request.key, instance, (text, 0.0, False, False, {}), time.perf_counter() - began_s)
        digest = instance.observations[0].digest
        if request.first_digest and digest != request.first_digest:
            raise _Failed(
                FailureCause.MALFORMED,
                f"reset with seed {request.seed} returned another observation than the one in the prompt: it must "
                "depend on the seed and the row only",
            )
        for number_, turn in enumerate(request.log, 1):
            self._step(request.key, instance, turn.action)
            if instance.observations[-1].digest != turn.digest:
                raise _Failed(
                    FailureCause.MALFORMED,
                    f"the replay of turn {number_} differs from the recorded turn: the environment depends on more "
                    "than its seed and actions; set replay = 'never'",
                )
        return instance

    def _step(self, key: EpisodeKey, instance: _Instance, action: str) -> None:
        last = instance.observations[-1]
        if last.is_terminated or last.is_truncated:
            raise _Failed(FailureCause.MALFORMED, f"the episode ended in turn {last.turn} and takes no more actions")
        self.called_at[key] = time.monotonic()
        began_s = time.perf_counter()
        try:
            result = instance.environment.step(action)
        except BaseException as error:
            raise _Failed(FailureCause.RAISED, f"step raised {describe_error(error)}") from error
        seconds = time.perf_counter() - began_s
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
            raise _Failed(
                FailureCause.MALFORMED,
                f"step returned a {type(result).__name__}, not (observation, reward, terminated, truncated, info)",
            )
        instance.actions.append(action)
        self._record(key, instance, result, seconds)

    def _record(self, key: EpisodeKey, instance: _Instance, result: tuple[Any, ...], seconds: float) -> None:
        text, reward, is_terminated, is_truncated, info = result
        if not isinstance(text, str):
            raise _Failed(FailureCause.MALFORMED, f"the observation is a {type(text).__name__}, not a string")
        outcome = number(reward)
        if isinstance(outcome, CallFailure):
            raise _Failed(FailureCause.MALFORMED, f"the reward: {outcome.detail}")
        text = text.encode(errors="replace").decode()  # a lone surrogate cannot be sent
        digest = digest_of(text, outcome.value or 0.0, bool(is_terminated), bool(is_truncated))
        if (num_cut := len(text) - self._max_chars) > 0:
            text = f"{text[: self._max_chars]}\n[{num_cut} more characters]"
        tool, success = info.get("tool"), info.get("success")
        instance.observations.append(
            Observation(
                key,
                len(instance.actions),
                text,
                outcome.value or 0.0,
                bool(is_terminated),
                bool(is_truncated),
                digest,
                seconds,
                None if tool is None else str(tool),
                None if success is None else bool(success),
                _metrics(info),
            )
        )


def _metrics(info: dict[str, Any]) -> dict[str, float]:
    numbers = {str(k): float(v) for k, v in info.items() if k != "success" and isinstance(v, Real)}
    return dict([(name, value) for name, value in numbers.items() if math.isfinite(value)][:MAX_METRICS])
