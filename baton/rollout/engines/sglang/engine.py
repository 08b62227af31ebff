"""A running SGLang server behind the `Engine` protocol: Baton's book keeps the leases, the server makes the tokens.

    submit ─▶ book: waiting ─▶ slot ═ /generate ═▶ server ═ stream ═▶ book: token by token ─▶ Report

`LeaseBook` decides what runs, when it ends and what is reported, as for every engine here; the server is asked for ids
and logprobs alone. The server is this engine's alone: its requests are all aborted when weights change.

**An abort** is reported when the server has let go of the request: all it made until then is in the report.

**A new version** comes to an idle server: all requests are aborted until its load is zero, their tokens are noted under
the old version, it reads the new weights from a directory and flushes its prefixes, and what may go on is asked for
anew, from its ids. So no token has a wrong version, and none is computed from keys and values of another one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from baton.errors import EngineFault, UserError
from baton.rollout.engine import EngineSettings, EngineStats
from baton.rollout.engines.sglang.client import Grown, Lost, Request, SglangLine
from baton.rollout.engines.slot_table import LeaseBook, Row, Text
from baton.rollout.engines.whole_weights import WholeWeights
from baton.types import FromWorker, Lease, PolicyVersion

_WAIT_S = 0.05
"""`step` waits so long for the first token: short enough for what else its caller has to do."""


@dataclass(slots=True)
class _Running:
    """A row that the server grows."""

    slot: int
    row: Row
    ids: list[int]
    """All so far."""
    is_ending: bool = False
    """Whether the server was asked to let go of it."""


class SglangEngine:
    """An `Engine` whose tokens an SGLang server makes. The caller drives it with `step`."""

    def __init__(
        self,
        line: SglangLine,
        weights: WholeWeights,
        settings: EngineSettings,
        end_ids: tuple[int, ...],
        text: Text,
        write_skeleton: Callable[[Path], None],
    ) -> None:
        """It serves no version until weights are loaded. write_skeleton: all of a model but its weights."""
        self._line, self._weights, self._settings = line, weights, settings
        self._write_skeleton = write_skeleton
        self._book = LeaseBook(settings, PolicyVersion("", -1), end_ids, text)
        self.running: dict[int, _Running] = {}
        self._keys = count()
        self._label = ""
        self._directory: Path | None = None
        """Of the weights that the server holds: it goes back to them when the next ones fail."""
        self._outbox: list[FromWorker] = []
        """What was to be reported outside of `step`."""
        self._prefilled_tokens = self._decoded_tokens = self._decode_steps = 0

    @property
    def version(self) -> PolicyVersion:
        """The weights that produce the next logits."""
        return self._book.version

    @property
    def slots(self) -> int:
        """Trajectories generated at once."""
        return len(self._book.rows)

    @property
    def stats(self) -> EngineStats:
        """Counters since the start; the server's steps are not seen from here: counted by the longest row's tokens."""
        return EngineStats(self._prefilled_tokens, self._decoded_tokens, self._decode_steps, self._decoded_tokens)

    def submit(self, lease: Lease) -> None:
        """Queue a lease. Raises UserError when its prompt leaves no room for a token, and for top-p and top-k.

        Versions of SGLang differ in whether logprobs are those before or after these have cut the vocabulary.
        """
        if lease.sampling.top_p < 1 or lease.sampling.top_k:
            raise UserError(
                f"trajectory {lease.trajectory.name}: got top_p {lease.sampling.top_p} and top_k "
                f"{lease.sampling.top_k}, but with SGLang only temperature is allowed"
            )
        self._book.submit(lease)

    def abort(self, lease_id: int) -> None:
        """End a lease; it is reported with all it has once the server has let go of it. Harmless for an unknown one."""
        keys = [key for key, running in self.running.items() if running.row.lease.lease_id == lease_id]
        for key in keys:
            self.running[key].is_ending = True
        if keys:
            self._line.end(keys)
        else:
            self._book.abort(lease_id)

    def step(self) -> list[FromWorker]:
        """Take what has come, fill free slots, and return what is to be reported; wait shortly where that is nothing.

        Raises EngineFault when the server gives a trajectory up, or says nothing of one for as long as
        engine.sglang.answer_timeout_s.
        """
        reports, self._outbox = self._outbox, []
        reports += self._take(0.0)
        reports += self._book.open_step()
        self._fill()
        if not reports and self.running:
            reports = [*self._take(_WAIT_S), *self._book.open_step()]
            self._fill()
        return reports

    def flush(self) -> list[FromWorker]:
        """Report what running leases have grown since their last report."""
        return [*self._take(0.0), *self._book.flush()]

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights; running leases go on under the new version, their keys and values computed again.

        Leases that asked for exactly another version are put down, those waiting get a Retry. Raises EngineFault, with
        nothing changed, for tensors that do not fit; and when the server does not take them.
        """
        whole = self._weights.whole(tensors)
        self._line.quiesce()
        self._outbox += self._take(0.0, is_quiet=True)
        directory, label = self._write(whole), f"{version.lineage}-{version.number}-{next(self._keys)}"
        try:
            self._line.load(str(directory), label)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._forget_directory()
        self._directory, self._label = directory, label
        self._book.switch(version)
        self._outbox += self._book.open_step()
        put_down, self.running = list(self.running.values()), {}
        self._begin([one for one in put_down if self._book.rows[one.slot] is one.row])

    def close(self) -> None:
        """Let go of the server, which stays. May be called twice."""
        self._line.close()
        self._forget_directory()

    def _write(self, whole: Mapping[str, Any]) -> Path:
        """Write a model's directory where the server reads it."""
        own, memory = self._settings.sglang.weights_directory, Path("/dev/shm")
        directory = Path(tempfile.mkdtemp(prefix="baton-", dir=own or (memory if memory.is_dir() else None)))
        directory.chmod(0o755)  # the server may be another user's
        self._write_skeleton(directory)
        save_file(dict(whole), directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def _forget_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _take(self, timeout_s: float, *, is_quiet: bool = False) -> list[FromWorker]:
        """Note the tokens that have come; return what is to be reported. is_quiet: every stream was to end."""
        reports: list[FromWorker] = []
        grown: dict[int, int] = {}
        for said in self._line.take(timeout_s):
            running = self.running.get(said.key)
            if running is None:
                continue  # it has ended here, by a stop string or its budget
            if isinstance(said, Lost):
                name = running.row.lease.trajectory.name
                raise EngineFault(f"{self._line.name} gave up trajectory {name}: {said.error}")
            grown[said.key] = grown.get(said.key, 0) + len(said.event.token_ids)
            self._prefilled_tokens += said.event.prefilled
            reports += self._grow(said, running, is_quiet=is_quiet)
        self._decode_steps += max(grown.values(), default=0)
        return reports

    def _grow(self, said: Grown, running: _Running, *, is_quiet: bool) -> list[FromWorker]:
        reports: list[FromWorker] = []
        event, row, slot = said.event, running.row, running.slot
        if event.weights is not None and event.weights != self._label:
            raise EngineFault(
                f"{self._line.name} serves weights {event.weights!r}, but was given {self._label!r}: somebody else "
                "changes them; a server is one engine's alone"
            )
        for token, logprob in zip(event.token_ids, event.logprobs, strict=True):
            self._decoded_tokens += 1
            running.ids.append(token)
            report = self._book.grow(slot, token, logprob)
            if report is not None:
                reports.append(report)
            if self._book.rows[slot] is not row:  # it has ended: what the server made beyond that is not wanted
                del self.running[said.key]
                if event.finish is None:
                    self._line.end([said.key])
                return reports
        if event.finish == "abort" and running.is_ending:
            del self.running[said.key]
            self._book.abort(row.lease.lease_id)
        elif event.finish is not None and not (event.finish == "abort" and is_quiet):
            raise EngineFault(
                f"{self._line.name} ended trajectory {row.lease.trajectory.name} after {row.length} tokens "
                f"({event.finish}), which nobody asked for: it has room for {row.room} more"
            )
        return reports

    def _fill(self) -> None:
        """Give free slots to waiting leases."""
        self._begin([_Running(slot, row, [*row.prefix_ids, row.last_id]) for slot, row in self._book.admit()])

    def _begin(self, rows: list[_Running]) -> None:
        """Ask for rows from the ids that they have."""
        requests = []
        for running in rows:
            key, row = next(self._keys), running.row
            self.running[key] = running
            requests.append(
                Request(
                    key,
                    tuple(running.ids),
                    row.room,
                    row.lease.sampling.temperature,
                    tuple(sorted(row.end_ids)),
                )
            )
        if requests:
            self._line.begin(requests)
