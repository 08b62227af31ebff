"""`ExternalEngine`: another program behind the `Engine` protocol. `SlotTable` keeps the leases.

    submit ─▶ SlotTable ─▶ slot ═ EngineRequest ═▶ program ═ GeneratedTokens ═▶ SlotTable ─▶ Report

`SlotTable` decides what runs, when it ends and what is reported, as for every engine; the program returns only ids and
logprobs. It runs as many requests as there are slots, so no request waits in two queues. Tokens are streamed, and those
after a stop string are discarded.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from baton.errors import EngineFault, UserError
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.client import EngineClient, EngineRequest, GeneratedTokens, RequestLost
from baton.rollout.engines.sampling import noise_key
from baton.rollout.engines.slot_table import RunningLease, SlotEngine, Text
from baton.rollout.engines.whole_weights import WholeWeights
from baton.types import FromWorker, Lease, PolicyVersion

_WAIT_S = 0.05
"""Longest wait of `step` for the first token; short, because the caller has other work."""
Client = TypeVar("Client", bound=EngineClient)


@dataclass(slots=True)
class RunningRequest:
    """A row for which the program generates."""

    slot: int
    row: RunningLease
    ids: list[int]
    """All ids so far, prompt included."""
    by_weights: Counter[str] = field(default_factory=Counter)
    """Tokens recorded by this engine, by the label of the weights at that time."""
    is_ending: bool = False
    """Whether an abort was requested that the program has not confirmed."""


class ExternalEngine(SlotEngine, Generic[Client]):
    """An `Engine` whose tokens another program generates. The caller drives it by calling `step`."""

    _only_temperature: str
    """Why top-p and top-k are refused, for the error."""

    def __init__(
        self,
        line: Client,
        weights: WholeWeights,
        settings: EngineSettings,
        version: PolicyVersion,
        end_ids: tuple[int, ...],
        text: Text,
    ) -> None:
        """line: a client of a program that serves `version` and can run as many requests as there are slots."""
        super().__init__(settings, version, end_ids, text)
        self._line, self._weights, self._settings = line, weights, settings
        self.running: dict[str, RunningRequest] = {}
        """By request key."""
        self._name = secrets.token_hex(4)
        self._keys = (f"{self._name}-{number:012x}" for number in count())
        self._num_loads = 0
        self._label = ""
        """Label of the program's weights; empty before the first load."""
        self._outbox: list[FromWorker] = []
        """Messages that arose outside of `step`; the next `step` returns them."""
        self._heard_s = time.monotonic()

    def submit(self, lease: Lease) -> None:
        """Queue a lease. Raises UserError if its prompt leaves no room for a token, and for top-p and top-k."""
        if lease.sampling.top_p < 1 or lease.sampling.top_k:
            raise UserError(
                f"trajectory {lease.trajectory.name}: got top_p {lease.sampling.top_p} and top_k "
                f"{lease.sampling.top_k}, but {self._only_temperature}"
            )
        super().submit(lease)

    def step(self) -> list[FromWorker]:
        """Record arrived tokens, fill free slots, and return the messages to send; wait briefly if there are none.

        Raises EngineFault when a request fails in the program, or the program sends nothing for its answer_timeout_s.
        """
        reports, self._outbox = self._outbox, []
        reports += [*self._collect_tokens(0.0), *self._abort_rows()]
        self._fill_slots()
        if not reports and self.running:
            reports = [*self._collect_tokens(_WAIT_S), *self._abort_rows()]
            self._fill_slots()
        return reports

    def flush(self) -> list[FromWorker]:
        return [*self._collect_tokens(0.0), *super().flush()]

    def close(self) -> None:
        self._line.close()

    def _collect_tokens(self, timeout_s: float) -> list[FromWorker]:
        """Record the tokens that have arrived; return the reports that are due."""
        reports: list[FromWorker] = []
        steps: Counter[str] = Counter()
        for said in self._line.take(timeout_s):
            self._heard_s = time.monotonic()
            running = self.running.get(said.key)
            if running is None:
                continue  # its lease has ended in the table: by a stop string, its budget or an abort
            if isinstance(said, RequestLost):
                self._line.check()
                name = running.row.lease.trajectory.name
                raise EngineFault(f"{self._line.name} gave up trajectory {name}: {said.error}")
            self._prefilled_tokens += said.prefilled
            steps[said.key] += len(said.token_ids)
            reports += self._append_tokens(said, running)
        self._decode_steps += max(steps.values(), default=0)  # an estimate: the program does not report its steps
        return reports

    def _append_tokens(self, said: GeneratedTokens, running: RunningRequest) -> list[FromWorker]:
        reports: list[FromWorker] = []
        for token, logprob in zip(said.token_ids, said.logprobs, strict=True):
            self._decoded_tokens += 1
            self._decode_rows += 1
            running.ids.append(token)
            running.by_weights[self._label] += 1
            report = self._book.grow(running.slot, token, logprob)
            if report is not None:
                reports.append(report)
            if not self._is_held(running):  # the row has ended: discard the program's further tokens
                del self.running[said.key]
                if said.finish is None:
                    self._line.end([said.key])
                return reports
        if said.finish is not None:
            self._ended_early(said, running)
        return reports

    def _ended_early(self, said: GeneratedTokens, running: RunningRequest) -> None:
        """Called when the program has ended a row that is still running in the table."""
        row = running.row
        raise EngineFault(
            f"{self._line.name} ended trajectory {row.lease.trajectory.name} after {row.length} tokens "
            f"({said.finish}), which nobody asked for: it has room for {row.room} more"
        )

    def _is_held(self, running: RunningRequest) -> bool:
        return self._book.rows[running.slot] is running.row

    def _abort_rows(self) -> list[FromWorker]:
        """Report aborted rows, and abort their requests in the program."""
        reports = self._book.open_step()
        ended = [key for key, running in self.running.items() if not self._is_held(running)]
        for key in ended:
            del self.running[key]
        if ended:
            self._line.end(ended)
        return reports

    def _fill_slots(self) -> None:
        """Admit waiting leases to free slots and start their requests."""
        self._submit_rows(
            [RunningRequest(slot, row, [*row.prefix_ids, row.last_id]) for slot, row in self._book.admit()]
        )

    def _submit_rows(self, rows: Sequence[RunningRequest]) -> None:
        """Start requests that continue rows from their current ids."""
        requests = []
        for running in rows:
            key, row = next(self._keys), running.row
            self.running[key] = running
            trajectory = row.lease.trajectory
            noise = noise_key(row.lease.noise_seed, trajectory.group_id, trajectory.sample_index)
            requests.append(
                EngineRequest(
                    key,
                    tuple(running.ids),
                    row.room,
                    row.lease.sampling.temperature,
                    tuple(sorted(row.end_ids)),
                    seed=noise_key(noise, row.length, 0) >> 1,
                    cache_salt=self._label or self._name,
                )
            )
        if requests:
            self._heard_s = time.monotonic()
            self._line.begin(requests)
