"""The open episodes of one process: executes turns, and rebuilds episodes from their logs."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

from baton.environments.adapters import LoadedEnvironment
from baton.environments.calls import ActFailure, ActRequest, EpisodeKey, Observation, digest_of
from baton.environments.environment import Environment
from baton.environments.tools import ConversationPrompt
from baton.rewards.functions import describe_error, number
from baton.rewards.scorer_protocol import CallFailure
from baton.types import FailureCause, Message

Result = TypeVar("Result")
MAX_METRICS = 32
"""Maximum number of metrics from one `info`."""
MAX_METRIC = 1e30
"""Maximum absolute value of a metric. The sum of larger values over episodes could exceed the range of a float."""


@dataclass(slots=True)
class _Instance:
    environment: Environment
    random_state: Any
    """Global random state of Python and numpy after the last call; None unless `serial` of the environment is "all"."""
    actions: list[str] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    """[len(`actions`) + 1] observations: the observation of the reset, then one for each action."""


class _Failed(Exception):
    def __init__(self, message: str, cause: FailureCause = FailureCause.MALFORMED) -> None:
        super().__init__(message)
        self.cause = cause


class EnvironmentInstances:
    """Executes requests. Requests of different episodes may run in different threads at once."""

    def __init__(self, environments: Mapping[str, LoadedEnvironment], max_observation_chars: int) -> None:
        self._environments = environments
        self._max_chars = max_observation_chars
        self._instances: dict[EpisodeKey, _Instance] = {}
        self._serial = threading.Lock()
        self.called_at: dict[EpisodeKey, float] = {}
        """Episode with a running call to `reset` or `step` → time at which this call began (monotonic clock)."""

    def act(self, request: ActRequest) -> Observation | ActFailure:
        """Execute a request. An error of the environment is returned as an `ActFailure`."""
        try:
            return self._act(request)
        except _Failed as failed:
            self.discard(request.key)
            return ActFailure(request.key, request.turn, failed.cause, str(failed))
        except Exception as error:  # noqa: BLE001 - such as a value whose conversion to a string raises
            self.discard(request.key)
            return ActFailure(request.key, request.turn, FailureCause.RAISED, describe_error(error))
        finally:
            self.called_at.pop(request.key, None)

    def discard(self, key: EpisodeKey, run: Callable[[Callable[[], None]], object] = lambda call: call()) -> None:
        """Forget the instance of an episode, if there is one, and close it. `run` receives a function that closes the
        instance, and must call this function, for example in another thread. The default calls the function
        immediately."""
        instance = self._instances.pop(key, None)
        if instance is not None and callable(close := getattr(instance.environment, "close", None)):

            def closed() -> None:
                with suppress(Exception):
                    close()

            run(closed)

    def _act(self, request: ActRequest) -> Observation:
        instance = self._instances.get(request.key)
        executed = [] if instance is None else instance.actions
        logged = executed[: request.num_left_out] + [turn.action for turn in request.log]
        wanted = logged if request.action is None else [*logged, request.action]
        if instance is not None and executed[: len(wanted)] == wanted:
            return instance.observations[len(wanted)]
        if instance is None or executed != logged:
            instance = self._rebuild(request, is_replaced=instance is not None)
        if request.action is not None:
            self._step(request, instance, request.action)
        return instance.observations[-1]

    def _rebuild(self, request: ActRequest, *, is_replaced: bool) -> _Instance:
        """Reset a new instance and repeat the log's actions. Raises _Failed if `replay` forbids the repetition, or if
        the digest of an observation differs from the recorded digest."""
        loaded = self._environments[request.environment]
        if loaded.replay == "never" and (request.log or is_replaced):
            what = "has executed other actions" if is_replaced else "is gone"
            text = f"the environment's instance {what}, and replay = 'never' forbids a new one"
            raise _Failed(text, FailureCause.CRASHED)
        assert not request.num_left_out, "the pool sends the whole log to a process without the instance"
        self.discard(request.key)

        def make_and_reset() -> tuple[Environment, Any]:
            if loaded.serial != "nothing":
                random.seed(request.seed)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(request.seed)
            environment = loaded.make()
            return environment, environment.reset(seed=request.seed, **request.row)

        (environment, text), seconds, random_state = self._call(request, "reset", make_and_reset, None)
        instance = _Instance(environment, random_state)
        self._instances[request.key] = instance
        self._record(request.key, instance, (text, 0.0, False, False, {}), seconds)
        if request.first_digest and instance.observations[0].digest != request.first_digest:
            raise _Failed(
                f"reset with seed {request.seed} returned an observation that differs from the one in the prompt; it "
                "must depend only on the seed and the row"
            )
        for turn_number, turn in enumerate(request.log, 1):
            self._step(request, instance, turn.action)
            if instance.observations[-1].digest != turn.digest:
                raise _Failed(
                    f"the replay of turn {turn_number} differs from the recorded turn: the environment depends on more "
                    "than its seed and actions; set replay = 'never'"
                )
        return instance

    def _step(self, request: ActRequest, instance: _Instance, action: str) -> None:
        last = instance.observations[-1]
        if last.is_terminated or last.is_truncated:
            raise _Failed(f"the episode ended in turn {last.turn} and accepts no more actions")
        result, seconds, instance.random_state = self._call(
            request, "step", lambda: instance.environment.step(action), instance.random_state
        )
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
            raise _Failed(
                f"step returned a {type(result).__name__}, not (observation, reward, terminated, truncated, info)"
            )
        instance.actions.append(action)
        self._record(request.key, instance, result, seconds)

    def _call(
        self, request: ActRequest, name: str, method: Callable[[], Result], random_state: Any
    ) -> tuple[Result, float, Any]:
        """Call the environment; return (result, seconds, random state). Calls that `serial` covers run one at a
        time."""
        serial = self._environments[request.environment].serial
        is_serial = serial == "all" or serial == name
        with self._serial if is_serial else nullcontext():
            self.called_at[request.key] = time.monotonic()
            began_s = time.perf_counter()
            if random_state is not None:
                _set_random_state(random_state)
            try:
                result = method()
            except BaseException as error:
                raise _Failed(f"{name} raised {describe_error(error)}", FailureCause.RAISED) from error
            return result, time.perf_counter() - began_s, _random_state() if serial == "all" else None

    def _record(self, key: EpisodeKey, instance: _Instance, result: tuple[Any, ...], seconds: float) -> None:
        text, reward, is_terminated, is_truncated, info = result
        if not isinstance(text, str):
            raise _Failed(f"the observation is a {type(text).__name__}, not a string")
        outcome = number(reward)
        if isinstance(outcome, CallFailure):
            raise _Failed(f"the reward: {outcome.detail}")
        text = _sendable(text)
        earlier = _earlier(instance.environment) if not instance.observations else ()
        asked = "\n\n".join([*(message.content for message in earlier), text])
        digest = digest_of(asked, outcome.value or 0.0, bool(is_terminated), bool(is_truncated))
        if (num_cut := len(text) - self._max_chars) > 0:
            text = f"{text[: self._max_chars]}\n[{num_cut} more characters]"
        instructions, canonical, tools = "", "", ()
        if not instance.observations:
            instructions = _sendable(getattr(instance.environment, "instructions", ""))
            tools = tuple(getattr(instance.environment, "rendered_tools", ()))
            method = getattr(instance.environment, "canonical", None)
            canonical = asked if method is None else _sendable(method())
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
                None if tool is None else _sendable(tool),
                None if success is None else bool(success),
                _metrics(info),
                instructions,
                canonical,
                tools,
                earlier,
            )
        )


def _random_state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def _earlier(environment: object) -> tuple[Message, ...]:
    messages = environment.earlier_messages if isinstance(environment, ConversationPrompt) else ()
    return tuple(Message(_sendable(role), _sendable(content)) for role, content in messages)


def _sendable(value: Any) -> str:
    """Return a value as text without lone surrogates, which cannot be encoded."""
    return str(value).encode(errors="replace").decode()


def _metrics(info: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in info.items():
        if name != "success" and isinstance(value, Real) and len(found) < MAX_METRICS:
            with suppress(OverflowError):  # an integer that is too large for a float
                found[_sendable(name)] = float(value)
    return {name: value for name, value in found.items() if abs(value) <= MAX_METRIC}  # false for NaN
