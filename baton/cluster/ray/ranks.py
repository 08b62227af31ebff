"""Runs trainer ranks as actors of a Ray cluster, in one placement group."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from baton.cluster.inventory import Machine
from baton.cluster.placement import ProcessSpec
from baton.cluster.ray.actors import PIECE_BYTES, RankActor
from baton.cluster.ray.connection import GET_S, START_DEADLINE_S, RayCluster, calling_ray
from baton.errors import Fault, RankLost, first_line
from baton.files import writing
from baton.trainer.parallel.messages import (
    FAULT_GRACE_S,
    HOW_TO_GO_ON,
    FromRank,
    RankInfo,
    ToRank,
    cause_of,
    decode_from_rank,
    encode,
)

CLOSE_GRACE_S: Final = 5.0
"""Maximum seconds for the actors to close before they are killed."""


class RayRanks:
    """Implements `Ranks` with Ray actors. If an actor ends, Ray reports this immediately."""

    def __init__(self, cluster: RayCluster, specs: Sequence[ProcessSpec], machines: Mapping[str, Machine]) -> None:
        """Start the actors. `machines`: name in the plan → machine. Raises RankLost if an actor cannot start."""
        self._cluster, self._specs = cluster, list(specs)
        self._is_here = machines[specs[0].machine].id == cluster.here
        self._actors: list[Any] = []
        self.group = cluster.reserve([(machines[spec.machine].id, spec.resources) for spec in specs], "baton-trainer")
        actor_class = cluster.ray.remote(RankActor)
        try:
            self._await_group(machines)
            with calling_ray():
                for rank, spec in enumerate(specs):
                    # an actor sees only its own GPU if it requests the resource `GPU`, otherwise all GPUs
                    gpu = None if "GPU" in spec.resources else int(spec.gpu_ids[0].rpartition(":")[2])
                    info = RankInfo(rank=rank, size=len(specs), threads=spec.threads, device_index=gpu)
                    actor = actor_class.options(**cluster.options(self.group, rank, spec))
                    address = machines[spec.machine].address
                    self._actors.append(actor.remote(encode(info), str(Path.cwd()), address))
                pids = [actor.pid.remote() for actor in self._actors]
                visible = [actor.visible.remote() for actor in self._actors]
            self.pids: list[int] = self._gather(lambda: pids, "Place", START_DEADLINE_S)
            self.visible: list[dict[str, str]] = self._gather(lambda: visible, "Visible", START_DEADLINE_S)
            """For each rank, the environment variable that restricts a process to its GPU."""
        except BaseException:
            self.close()
            raise

    def ask(self, message: ToRank, timeout_s: float) -> list[FromRank]:
        encoded = encode(message)

        def call() -> list[Any]:
            data = self._cluster.ray.put(encoded)  # put once, so that each machine receives the message once
            return [actor.handle.remote(data) for actor in self._actors]

        return self._gather(call, type(message).__name__, timeout_s)

    def bring(self, path: str) -> Path:
        """Return a local path of a file of rank 0: the file itself if rank 0 is on this machine, else a copy."""
        if self._is_here:
            return Path(path)
        handle, name = tempfile.mkstemp(prefix="baton-version-")
        try:
            with writing(Path(name)), os.fdopen(handle, "wb") as file:
                while True:
                    (piece,) = self._gather(
                        lambda: [self._actors[0].take.remote(path, file.tell())], "bring a version", START_DEADLINE_S
                    )
                    file.write(memoryview(piece))
                    if len(piece) < PIECE_BYTES:
                        return Path(name)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def close(self) -> None:
        actors, self._actors = self._actors, []
        ray = self._cluster.ray
        with suppress(Exception):  # an actor may have ended or hang in a collective; it is killed below
            ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSE_GRACE_S)
        for actor in actors:
            with suppress(Exception):
                ray.kill(actor)
        self._cluster.release(self.group)

    @calling_ray()
    def _await_group(self, machines: Mapping[str, Machine]) -> None:
        ready, until_s = self.group.ready(), time.monotonic() + START_DEADLINE_S
        while not self._cluster.ray.wait([ready], timeout=1.0)[0]:
            alive = self._cluster.alive()
            for spec in self._specs:
                if machines[spec.machine].id not in alive:
                    raise RankLost(f"trainer {spec.name} cannot start: its machine {spec.machine} has left the cluster")
            if time.monotonic() > until_s:
                requested = "; ".join(f"{spec.name} on {spec.machine}: {spec.requested}" for spec in self._specs)
                raise RankLost(
                    f"Ray did not grant the trainer its resources in {START_DEADLINE_S:.0f} s ({requested}): "
                    "another user of the cluster holds them"
                )

    def _gather(self, call: Callable[[], list[Any]], what: str, timeout_s: float) -> list[Any]:
        """Return the answers of all ranks; bytes are decoded as messages. `call`: calls the ranks' actors, and returns
        the Ray futures. If a rank is lost or does not answer, close all actors and raise the same errors as
        `Ranks.ask`."""
        ray, deadline_s = self._cluster.ray, time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        try:
            with calling_ray():
                futures = call()
            while len(answers) < len(futures):
                waiting = {future: rank for rank, future in enumerate(futures) if rank not in answers}
                with calling_ray():
                    ready, _ = ray.wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    names = ", ".join(self._name(rank) for rank in waiting.values())
                    raise RankLost(f"trainer {names} did not answer {what} in {timeout_s:.0f} s; {HOW_TO_GO_ON}")
                for future in ready:
                    rank, answer = waiting[future], self._get(future, waiting[future])
                    answers[rank] = decode_from_rank(answer) if isinstance(answer, bytes) else answer
                    if isinstance(answers[rank], Fault):
                        deadline_s = min(deadline_s, time.monotonic() + FAULT_GRACE_S)
        except RankLost as lost:
            self.close()
            raise cause_of(lost, answers) from lost
        return [answers[rank] for rank in range(len(futures))]

    @calling_ray()
    def _get(self, future: Any, rank: int) -> Any:
        try:
            return self._cluster.ray.get(future, timeout=GET_S)
        except self._cluster.ray.exceptions.RayTaskError as error:
            raise RankLost(f"trainer {self._name(rank)} cannot continue: {error.cause}; {HOW_TO_GO_ON}") from error
        except self._cluster.ray.exceptions.RayError as error:
            raise RankLost(f"trainer {self._name(rank)} was lost: {first_line(error)[:200]}; {HOW_TO_GO_ON}") from error

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._specs[rank].machine}"
