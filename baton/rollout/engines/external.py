"""`ExternalEngine`: the base class of engines in which another program (vLLM, an SGLang server) generates the tokens.

    submit ─▶ SlotTable ─▶ slot ═ EngineRequest ═▶ program ═ GeneratedTokens ═▶ SlotTable ─▶ Report

As in every engine, `SlotTable` decides which leases run, when they end, and what is reported. The program returns token
ids and logprobs and, if configured, sampling masks and experts. The program can run as many requests as there are
slots, so leases wait only in `SlotTable`. The program streams tokens, and `ExternalEngine` discards tokens after a stop
string.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import contains
from typing import Any, Generic, TypeVar

import numpy as np

from baton.clock import Clock
from baton.errors import EngineFault, UserError
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.client import EngineClient, EngineRequest, GeneratedTokens, RequestLost
from baton.rollout.engines.sampling import noise_key
from baton.rollout.engines.slot_table import RunningLease, SlotEngine
from baton.rollout.engines.whole_weights import ReadBase, Skeleton, WholeWeights
from baton.types import FromWorker, Lease, PolicyVersion

_WAIT_S = 0.05
"""Maximum seconds that `step` waits for the first token. The wait is short because the caller has other work."""
Client = TypeVar("Client", bound=EngineClient)


@dataclass(slots=True)
class RunningRequest:
    """A request that the program is processing, with its lease."""

    slot: int
    row: RunningLease
    by_weights: Counter[str] = field(default_factory=Counter)
    """Label of weights → number of tokens that were received while the program held these weights."""
    is_ending: bool = False
    """Whether the request was aborted, but the program has not confirmed the abort."""
    unrouted: list[GeneratedTokens] = field(default_factory=list)
    """Tokens that are recorded when the request ends, because the program returns their routing only then."""


def joined(said: Sequence[GeneratedTokens]) -> GeneratedTokens:
    """Merge the messages of a request. The result has the tokens, logprobs and masks of all messages, and all other
    fields of the last message."""
    return replace(
        said[-1],
        token_ids=[token for one in said for token in one.token_ids],
        logprobs=[logprob for one in said for logprob in one.logprobs],
        masks=None if said[-1].masks is None else [mask for one in said for mask in one.masks or ()],
    )


class ExternalEngine(SlotEngine, Generic[Client]):
    """Base class of engines in which another program generates the tokens."""

    _only_temperature: str
    """Part of the error message that says why this engine refuses top-p and top-k."""

    def __init__(
        self,
        client: Client,
        skeleton: Skeleton,
        read_base: ReadBase | None,
        settings: EngineSettings,
        version: PolicyVersion,
        clock: Clock = time.monotonic,
    ) -> None:
        """`client`: client of a program that serves `version` and can run `settings.slots` requests at once.
        `read_base`: reads the tensors of the base model; required if versions are adapters."""
        super().__init__(settings, version, skeleton.end_ids, skeleton.text)
        self.client, self._skeleton, self._settings = client, skeleton, settings
        self._weights = WholeWeights(skeleton.model, read_base)
        self.running: dict[str, RunningRequest] = {}
        self._name = secrets.token_hex(4)
        self._keys = (f"{self._name}-{number:012x}" for number in count())
        self._label = ""
        """Label of the weights that the program has now; empty before the first load."""
        self._outbox: list[FromWorker] = []
        """Messages that methods other than `step` have produced. The next `step` returns these messages."""
        self._clock, self._active_s = clock, clock()
        """`_active_s`: time of the last received token, started request or loaded version."""
        self._is_paused = False
        """Whether the program is paused: a load has begun, and no load has succeeded since then."""

    def submit(self, lease: Lease) -> None:
        """Queue a lease. Raises UserError if the prompt leaves no room for a token. An engine that reports sampling
        masks requires top-p or top-k, and raises UserError without them. An engine that does not report masks raises
        UserError if top-p or top-k is set."""
        sampling = lease.sampling
        if self.mask_dtype is not None and not (sampling.reports_kept and sampling.temperature):
            raise UserError(
                f"trajectory {lease.trajectory.name}: {self.client.name} reports sampling masks, so it "
                "accepts only rollouts with top_p or top_k; evaluate with another engine (eval.enabled = false)"
            )
        if self.mask_dtype is None and (sampling.top_p < 1 or sampling.top_k):
            raise UserError(
                f"trajectory {lease.trajectory.name}: got top_p {sampling.top_p} and top_k {sampling.top_k}, but "
                f"{self._only_temperature}"
            )
        super().submit(lease)

    def step(self) -> list[FromWorker]:
        """Record received tokens, start leases in free slots, and return reports. If no report is due, wait briefly for
        tokens. Raises EngineFault if a request fails in the program."""
        reports, self._outbox = self._outbox, []
        reports += [*self._collect_tokens(0.0), *self._abort_rows()]
        self._fill_slots()
        if not reports and self.running:
            reports = [*self._collect_tokens(_WAIT_S), *self._abort_rows()]
            self._fill_slots()
        return reports

    def flush(self) -> list[FromWorker]:
        self.client.flush()
        return [*self._collect_tokens(0.0), *super().flush()]

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights immediately. Running leases continue under the new version. Raises EngineFault, without
        changing any weight, for tensors that do not fit."""
        loadable = self._loadable(tensors)
        label = self.begin_load(version)
        self._load_tensors(loadable, version, label)
        self.end_load(version, label)

    def begin_load(self, version: PolicyVersion) -> str:
        """Pause the program; record all generated tokens under the old version. Return the label of the new weights."""
        self._is_paused = True
        self.client.pause()
        self._outbox += self._collect_tokens(0.0)
        return f"{version.lineage}-{version.number}-{next(self._keys)}"

    def end_load(self, version: PolicyVersion, label: str) -> None:
        """Resume generation with a version that the program has loaded since `begin_load`."""
        self._label = label
        self._table.switch(version)
        self._outbox += self._abort_rows()
        self.client.resume()
        self._is_paused, self._active_s = False, self._clock()

    @property
    def mask_dtype(self) -> str | None:
        """Dtype (`kept_dtype`) of the sampling masks that the program reports; None if the program reports no masks."""
        return None

    def _loadable(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a version's tensors to the form that `_load_tensors` needs: all tensors of the model, named as in the
        files of the model."""
        return self._weights.whole(tensors)

    @abstractmethod
    def _load_tensors(self, tensors: Mapping[str, Any], version: PolicyVersion, label: str) -> None:
        """Make the program load the tensors of a version. The caller has paused generation."""

    def close(self) -> None:
        self.client.close()

    def _collect_tokens(self, timeout_s: float) -> list[FromWorker]:
        """Record the tokens received within `timeout_s`; return the reports that are due."""
        reports: list[FromWorker] = []
        steps: Counter[str] = Counter()
        for said in self.client.take(timeout_s):
            self._active_s = self._clock()
            running = self.running.get(said.key)
            if running is None:
                continue  # the lease has ended, because of a stop string, the token budget or an abort
            if isinstance(said, RequestLost):
                self.client.check()
                name = running.row.lease.trajectory.name
                raise EngineFault(f"{self.client.name} failed to generate trajectory {name}: {said.error}")
            self._prefilled_tokens += said.prefilled
            steps[said.key] += len(said.token_ids)
            reports += self._append_tokens(said, running)
        # the program does not report its steps, so each step is assumed to generate one token per request
        self._decode_steps += max(steps.values(), default=0)
        return reports

    def _append_tokens(self, said: GeneratedTokens, running: RunningRequest) -> list[FromWorker]:
        reports: list[FromWorker] = []
        masks, routing = self._masks(said, running), said.routing or (None,) * len(said.token_ids)
        for token, logprob, mask, experts in zip(said.token_ids, said.logprobs, masks, routing, strict=True):
            self._decoded_tokens += 1
            self._decode_rows += 1
            running.by_weights[self._label] += 1
            report = self._table.grow(running.slot, token, logprob, experts, kept=mask)
            if report is not None:
                reports.append(report)
            if not self._is_held(running):  # the lease has ended, so further tokens from the program are discarded
                del self.running[said.key]
                if said.finish is None:
                    self.client.end([said.key])
                return reports
        if said.finish is not None:
            self._ended_early(said, running)
        return reports

    def _masks(self, said: GeneratedTokens, running: RunningRequest) -> Sequence[bytes]:
        """Encode the sampling masks of new tokens; empty bytes if the program reports none."""
        if self.mask_dtype is None:
            return [b""] * len(said.token_ids)
        masks = said.masks or ()
        if len(masks) != len(said.token_ids) or not all(map(contains, masks, said.token_ids)):
            raise EngineFault(
                f"trajectory {running.row.lease.trajectory.name}: {self.client.name} reported {len(masks)} sampling "
                f"masks for {len(said.token_ids)} tokens, or a mask without the generated token"
            )
        return [np.array(mask, dtype=self.mask_dtype).tobytes() for mask in masks]

    def _ended_early(self, said: GeneratedTokens, running: RunningRequest) -> None:
        """Handle a request that the program has ended although its lease is still running in the table."""
        row = running.row
        raise EngineFault(
            f"{self.client.name} ended trajectory {row.lease.trajectory.name} after {row.length} tokens "
            f"(finish reason {said.finish!r}) without an abort, although {row.room} more tokens are allowed"
        )

    def _is_held(self, running: RunningRequest) -> bool:
        return self._table.rows[running.slot] is running.row

    def _abort_rows(self) -> list[FromWorker]:
        """Abort the requests of aborted leases in the program; return the reports of these leases."""
        reports: list[FromWorker] = []
        if self._table.aborted() and self.client.flush():
            reports += self._collect_tokens(0.0)
        reports += self._table.open_step()
        ended = [key for key, running in self.running.items() if not self._is_held(running)]
        for key in ended:
            del self.running[key]
        if ended:
            self.client.end(ended)
        return reports

    def _fill_slots(self) -> None:
        self._submit_rows([RunningRequest(slot, row) for slot, row in self._table.admit()])

    def _submit_rows(self, rows: Sequence[RunningRequest]) -> None:
        requests = []
        for running in rows:
            key, row = next(self._keys), running.row
            self.running[key] = running
            trajectory = row.lease.trajectory
            noise = noise_key(row.lease.noise_seed, trajectory.group_id, trajectory.sample_index)
            requests.append(
                EngineRequest(
                    key,
                    tuple(row.ids),
                    row.room,
                    row.lease.sampling,
                    tuple(sorted(row.end_ids)),
                    seed=noise_key(noise, row.length, 0) >> 1,
                    cache_salt=self._label or self._name,
                )
            )
        if requests:
            self._active_s = self._clock()
            self.client.begin(requests)
