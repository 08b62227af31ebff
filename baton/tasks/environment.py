"""Multi-turn problems: the first observation of an environment is the prompt, and the environment gives the reward."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from blake3 import blake3

from baton.environments.adapters import load_environment
from baton.environments.calls import ActFailure, ActRequest, EnvironmentSpec, EpisodeKey, Observation
from baton.environments.instances import EnvironmentInstances
from baton.environments.pool import EnvironmentPool
from baton.environments.settings import EnvironmentSettings
from baton.errors import UserError
from baton.tasks.problem import Problem
from baton.types import FailureCause, Message

SHIPPED = {
    "sokoban": "baton.environments.sokoban:Sokoban",
    "maze": "baton.environments.maze:Maze",
    "calculator": "baton.environments.calculator:Calculator",
    "code": "baton.environments.code:CodeTask",
}
"""Short name → import path of each environment of Baton. The run resets these environments in its own process."""
RESETS = 3
"""Maximum number of resets for one draw; a reset that fails is repeated."""
POLL_S = 1.0
"""Seconds between two checks for a stop request while an environment is reset."""


def import_path(given: Any) -> Any:
    """Return the import path of a class or function. Return any other value unchanged. Raises ValueError if another
    process could not import the class or function."""
    if not callable(given):
        return given
    module, name = given.__module__, getattr(given, "__qualname__", "<object>")
    if not name.isidentifier() or module == "__main__":
        raise ValueError(
            f"{module}:{name} cannot be imported by another process; define it at the top level of a module, not of "
            "the script"
        )
    return f"{module}:{name}"


class EnvironmentTask:
    """A source of episodes. Draw `i` of a stream resets the environment with a seed that is derived from `i` and the
    stream's seed."""

    def __init__(
        self, spec: EnvironmentSpec, settings: EnvironmentSettings, rows: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """`rows`: rows of a dataset. Each draw passes one row to `reset`; no row repeats before every row has been
        drawn. Raises UserError if the environment does not load, or if a row has the column `seed`."""
        if any("seed" in row for row in rows):
            raise UserError(
                f"task {spec.name!r}: the dataset has a column 'seed', but Baton passes its own seed to `reset`; "
                "rename this column"
            )
        self.spec, self.name = spec, spec.name
        self._settings, self.rows = settings, rows
        self.check_stop: Callable[[], None] = lambda: None
        """Called about once a second while an environment is reset. An error that it raises ends the reset."""
        self._lock = threading.Lock()
        self._pool: EnvironmentPool | None = None
        self._local: EnvironmentInstances | None = None
        if spec.path in SHIPPED.values():
            self._local = EnvironmentInstances({spec.name: load_environment(spec)}, settings.max_observation_chars)

    def draw(self, seed: int, index: int) -> Problem:
        """Return problem `index` of the stream with this seed. Raises UserError if all `RESETS` resets fail."""
        digest = blake3(f"environment:{self.name}:{seed}:{index}".encode()).digest(length=4)
        reset_seed = int.from_bytes(digest, "big")
        row = dict(self.rows[index % len(self.rows)]) if self.rows else {}
        request = ActRequest(EpisodeKey(-1, 0, 0), self.name, reset_seed, row)
        for _ in range(RESETS):
            first = self._reset(request)
            # the pool has already repeated a reset that timed out or ended its process
            if isinstance(first, Observation) or first.cause in (FailureCause.TIMEOUT, FailureCause.CRASHED):
                break
        if isinstance(first, ActFailure):
            place = f", row {index % len(self.rows)} of the dataset, counted from 0" if self.rows else ""
            raise UserError(
                f"task {self.name!r}: the environment failed on a reset: {first.message} ({first.cause}, with "
                f"seed {reset_seed}{place}); repair the environment or the row"
            )
        question = "\n\n".join(filter(None, (first.instructions, first.text)))
        metadata = {"environment": self.name, "seed": reset_seed, "row": row, "first_digest": first.digest}
        if first.tools:
            metadata["tools"] = list(first.tools)
        return Problem(question, first.canonical, None, metadata, (*first.earlier, Message("user", question)))

    def random_episode(self, metadata: Mapping[str, Any], dice: random.Random) -> Iterator[str]:
        """Play random actions until the episode ends; yield actions and observations alternately, ending with an
        action. Raises UserError if the environment does not ship with Baton, or has no random actions."""
        environment: Any = load_environment(self.spec).make() if self._local is not None else None
        if not hasattr(environment, "random_action"):
            raise UserError(
                f"demonstrations: the environment of task {self.name!r} has no random actions; allowed are 'sokoban', "
                "'maze' and 'calculator'. Give recorded demonstrations with data = \"FILE\" instead"
            )
        environment.reset(seed=metadata["seed"], **metadata["row"])
        while True:
            action = environment.random_action(dice)
            yield action
            observation, _, is_terminated, is_truncated, _ = environment.step(action)
            if is_terminated or is_truncated:
                return
            yield observation

    def close(self) -> None:
        """End the process that resets environments, if it was started."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _reset(self, request: ActRequest) -> Observation | ActFailure:
        with self._lock:
            if self._local is not None:
                result = self._local.act(request)
                self._local.discard(request.key)
                return result
            if self._pool is None:
                settings = self._settings.model_copy(update={"processes": 1})
                self._pool = EnvironmentPool({self.name: self.spec}, settings)
            self._pool.submit(request)
            try:
                # the loop ends, because the pool has a deadline for each call
                while not (found := self._pool.collect(POLL_S)):
                    self.check_stop()
            finally:
                self._pool.discard(request.key)
                self._pool.metrics()  # clears the pool's lists of durations
            return found[0]
