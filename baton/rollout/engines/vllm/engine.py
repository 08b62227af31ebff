"""vLLM behind the `Engine` protocol: Baton's book keeps the leases, vLLM makes the tokens.

    submit ─▶ book: waiting ─▶ slot ═ Request ═▶ vLLM ═ Grown ═▶ book: token by token ─▶ Report

`LeaseBook` decides what runs, when it ends and what is reported, as for every engine here; vLLM is asked for ids and
logprobs alone. It has as many places as the book has slots, so nothing waits in two queues. Its tokens come as they
are made: what it makes beyond a stop string is thrown away.

**A new version** is taken between two of vLLM's steps: pause (requests stay where they are), take every token that was
made, note it under the old version, copy the tensors in place, switch the book, go on. Running requests keep their keys
and values. Prefixes are shared under a salt that changes with the weights: none of an older version is ever found.

**Noise**: each request has a seed from (run seed, group, sample, position where it begins). The same request alone
draws the same tokens again; what Baton's keyed noise promises beyond that (any machine, any resume) vLLM does not.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from baton.errors import EngineFault, UserError
from baton.rollout.engine import EngineSettings, EngineStats
from baton.rollout.engines.sampling import noise_key
from baton.rollout.engines.slot_table import LeaseBook, Row, Text
from baton.rollout.engines.vllm.client import Grown, Lost, Request, VllmLine
from baton.rollout.engines.whole_weights import WholeWeights
from baton.types import FromWorker, Lease, PolicyVersion

_WAIT_S = 0.05
"""`step` waits so long for the first token: short enough for what else its caller has to do."""


@dataclass(slots=True)
class _Running:
    """A row that vLLM grows."""

    slot: int
    row: Row
    by_weights: Counter[str] = field(default_factory=Counter)
    """Tokens noted here, by the label of the weights that they were noted under."""


class VllmEngine:
    """An `Engine` whose tokens vLLM makes, in processes of its own. The caller drives it with `step`."""

    def __init__(
        self,
        line: VllmLine,
        weights: WholeWeights,
        settings: EngineSettings,
        version: PolicyVersion,
        end_ids: tuple[int, ...],
        text: Text,
    ) -> None:
        """line: a vLLM that serves `version`, with as many places as there are slots."""
        self._line, self._weights, self._settings = line, weights, settings
        self._book = LeaseBook(settings, version, end_ids, text)
        self._running: dict[str, _Running] = {}
        """By request."""
        self._name = secrets.token_hex(4)
        self._keys = (f"{self._name}-{number}" for number in count())
        self._num_loads = 0
        self._label = ""
        """Of the weights, as vLLM knows them; empty before the first load."""
        self._outbox: list[FromWorker] = []
        """What was to be reported outside of `step`."""
        self._heard_s = time.monotonic()
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
        """Counters since the start; vLLM's steps are not seen: the tokens of the longest row stand for them."""
        return EngineStats(self._prefilled_tokens, self._decoded_tokens, self._decode_steps, self._decoded_tokens)

    def submit(self, lease: Lease) -> None:
        """Queue a lease. Raises UserError when its prompt leaves no room for a token, and for top-p and top-k.

        vLLM says how likely a token was after these have cut the vocabulary; a trajectory wants to know it before.
        """
        if lease.sampling.top_p < 1 or lease.sampling.top_k:
            raise UserError(
                f"trajectory {lease.trajectory.name}: got top_p {lease.sampling.top_p} and top_k "
                f"{lease.sampling.top_k}, but vLLM gives logprobs after the cut: allowed is temperature alone"
            )
        self._book.submit(lease)

    def abort(self, lease_id: int) -> None:
        """End a lease; the next `step` reports what it has. Harmless for a lease that is unknown or already ended."""
        self._book.abort(lease_id)

    def step(self) -> list[FromWorker]:
        """Take what has come, fill free slots, and return what is to be reported; wait shortly where that is nothing.

        Raises EngineFault when vLLM is dead, gives a lease up, or has been silent for engine.vllm.answer_timeout_s.
        """
        reports, self._outbox = self._outbox, []
        reports += self._take(0.0)
        reports += self._put_down()
        self._fill()
        if not reports and self._running:
            reports = self._take(_WAIT_S)
            self._fill()
        return reports

    def flush(self) -> list[FromWorker]:
        """Report what running leases have grown since their last report."""
        return [*self._take(0.0), *self._book.flush()]

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Switch to new weights at once; running leases keep their KV cache and go on under the new version.

        Leases that asked for exactly another version are put down, those waiting get a Retry. Raises EngineFault, with
        nothing changed, for tensors that do not fit.
        """
        whole = self._weights.whole(tensors)
        self._line.pause()
        self._outbox += self._take(0.0)
        self._num_loads += 1
        self._label = f"{self._name}-{self._num_loads}"
        taken = self._load(whole, self._label)
        if taken != len(whole):
            raise EngineFault(f"vLLM took {taken} of the {len(whole)} tensors of version {version.number}")
        self._book.switch(version)
        self._outbox += self._put_down()
        self._line.resume()
        self._heard_s = time.monotonic()

    def close(self) -> None:
        """End vLLM's processes. May be called twice."""
        self._line.close()

    def _load(self, whole: Mapping[str, Any], label: str) -> int:
        """Hand tensors over in one file in memory, which all workers of this machine read."""
        memory = Path("/dev/shm")
        directory = Path(tempfile.mkdtemp(prefix="baton-", dir=memory if memory.is_dir() else None))
        try:
            path = directory / "weights.safetensors"
            save_file(dict(whole), path)
            return self._line.load(str(path), label)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _take(self, timeout_s: float) -> list[FromWorker]:
        """Note the tokens that have come; return what is to be reported of them."""
        reports: list[FromWorker] = []
        steps: dict[str, int] = {}
        for said in self._line.take(timeout_s):
            self._heard_s = time.monotonic()
            running = self._running.get(said.key)
            if running is None:
                continue  # of a lease that has ended here
            if isinstance(said, Lost):
                self._line.check()
                name, error = running.row.lease.trajectory.name, said.error
                raise EngineFault(f"vLLM gave up trajectory {name}: {type(error).__name__}: {error}") from error
            self._prefilled_tokens += said.prefilled
            steps[said.key] = steps.get(said.key, 0) + len(said.token_ids)
            reports += self._grow(said, running)
        self._decode_steps += max(steps.values(), default=0)
        if self._running and time.monotonic() - self._heard_s > self._settings.vllm.answer_timeout_s:
            raise EngineFault(
                f"vLLM has made no token in {self._settings.vllm.answer_timeout_s:.0f} s, with {len(self._running)} "
                "trajectories running (engine.vllm.answer_timeout_s)"
            )
        return reports

    def _grow(self, said: Grown, running: _Running) -> list[FromWorker]:
        reports: list[FromWorker] = []
        row = running.row
        for token, logprob in zip(said.token_ids, said.logprobs, strict=True):
            self._decoded_tokens += 1
            running.by_weights[self._label] += 1
            report = self._book.grow(running.slot, token, logprob)
            if report is not None:
                reports.append(report)
            if self._book.rows[running.slot] is not row:  # it has ended: what vLLM made beyond that is not wanted
                del self._running[said.key]
                if said.finish is None:
                    self._line.end([said.key])
                else:
                    self._check_account(said, running)
                return reports
        if said.finish is not None:
            raise EngineFault(
                f"vLLM ended trajectory {row.lease.trajectory.name} after {row.length} tokens ({said.finish}), which "
                f"has room for {row.room} more"
            )
        return reports

    def _check_account(self, said: Grown, running: _Running) -> None:
        """Raise EngineFault where vLLM says that other weights made these tokens than was noted here."""
        account = said.by_weights
        if account is None or "" in running.by_weights or sum(account.values()) != running.by_weights.total():
            return  # nothing to compare, or it made more than is wanted
        if account != running.by_weights:
            raise EngineFault(
                f"trajectory {running.row.lease.trajectory.name}: noted here are the weights {running.by_weights}, and "
                f"vLLM says {said.by_weights} (label: tokens)"
            )

    def _put_down(self) -> list[FromWorker]:
        """Report what was aborted, and have vLLM let go of it."""
        reports = self._book.open_step()
        ended = [key for key, one in self._running.items() if self._book.rows[one.slot] is not one.row]
        for key in ended:
            del self._running[key]
        if ended:
            self._line.end(ended)
        return reports

    def _fill(self) -> None:
        """Give free slots to waiting leases."""
        requests = []
        for slot, row in self._book.admit():
            key = next(self._keys)
            self._running[key] = _Running(slot, row)
            requests.append(self._request(key, row))
        if requests:
            self._heard_s = time.monotonic()
            self._line.begin(requests)

    def _request(self, key: str, row: Row) -> Request:
        trajectory, sampling = row.lease.trajectory, row.lease.sampling
        noise = noise_key(row.lease.noise_seed, trajectory.group_id, trajectory.sample_index)
        return Request(
            key,
            (*row.prefix_ids, row.last_id),
            row.room,
            sampling.temperature,
            noise_key(noise, row.length, 0) >> 1,
            tuple(sorted(row.end_ids)),
            self._label or self._name,
        )
