"""A worker's side: from the version it holds to the one that is wanted, or no change at all.

    plan      manifests from the wanted version back to the one held, or to one that can be had whole: the fewest bytes
    gather    chunks from the sources, each verified before it is used; a bad one names its source (`chunk_fetcher.py`)
    stage     a copy of what is held, changed part by part; what is held stays as it is
    verify    every tensor, by the digest that the wanted version vouches for
    switch    the copy is held from now on

Any fault on the way raises an error that names it and leaves what is held untouched; the next fetch begins afresh.
Memory: what is held, the copy, one chunk and one part.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.errors import WeightsFault
from baton.policy.tensors import weights_digest
from baton.types import PolicyVersion
from baton.weights.bitstream import Bytes
from baton.weights.chunk_fetcher import ChunkFetcher, FetchStats
from baton.weights.delta import decode
from baton.weights.flat_buffer import flattened, layout_of, piece_digests, tensors_of
from baton.weights.manifest import Encoding, Manifest, TensorEntry, check_version, name_of, tensors_digest
from baton.weights.shared import SharedMemory
from baton.weights.sources import ChunkCache, WeightsSource

MAX_STEPS = 4096
"""Versions that a plan may lead through."""


@dataclass(frozen=True, slots=True)
class _Staged:
    """A version in one stretch of bytes."""

    version: PolicyVersion
    entries: tuple[TensorEntry, ...]
    flat_buffer: Bytes


@dataclass(frozen=True, slots=True)
class _Step:
    """One version of a plan, and who gave its manifest."""

    manifest: Manifest
    way: Encoding
    source: WeightsSource


class _BadPlan(Exception):
    """Chunks that are just what manifests ask for do not make the version: whoever gave a manifest is at fault."""

    def __init__(self, text: str, sources: list[WeightsSource]) -> None:
        super().__init__(text)
        self.sources = sources


class Fetcher:
    """Holds one version, and fetches the next. Blocks: run it in a thread."""

    def __init__(
        self,
        sources: Sequence[WeightsSource],
        *,
        shared: SharedMemory | None = None,
        cache: ChunkCache | None = None,
        seed: int | None = None,
    ) -> None:
        """shared: versions that this machine's trainer wrote; cache: where chunks stay; seed: of the sources' order."""
        self.sources, self.shared, self._cache = list(sources), shared, cache
        self._order = random.Random(seed)
        self._avoided: set[str] = set()
        """Sources that once gave something else than was asked for: they come last."""
        self._held: tuple[PolicyVersion, Mapping[str, torch.Tensor]] | None = None
        self._staged: _Staged | None = None
        """What is held as one stretch; none while it is only mapped."""
        self._lock = threading.Lock()
        self.last: FetchStats | None = None
        """What the latest fetch took."""

    @property
    def held(self) -> PolicyVersion | None:
        """The version held."""
        return None if self._held is None else self._held[0]

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Those of the version held, by name; not to be changed."""
        return {} if self._held is None else self._held[1]

    def hold(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a version that was had by other means. Raises WeightsFault unless its tensors are the version's."""
        with self._lock:
            _check_digest(version, weights_digest(tensors))
            self._held, self._staged = (version, tensors), None

    def fetch(self, want: PolicyVersion, *, deadline_s: float) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a version, verified, and hold it from now on; they are not to be changed.

        Raises WeightsFault where no source has it whole and right, StorageFault where the cache cannot be written, and
        DeadlineExceeded: in each case what was held is held still.
        """
        begin = time.monotonic()
        with self._lock:
            self.last = record = FetchStats(want)
            try:
                check_version(want)
                if self.held != want and not self._mapped(want, record):
                    self._built(want, record, deadline_s)
            finally:
                record.seconds = time.monotonic() - begin
            return self.tensors

    def _mapped(self, want: PolicyVersion, record: FetchStats) -> bool:
        """Hold a version from this machine's memory, if it is there and right."""
        if self.shared is None:
            return False
        try:
            tensors = self.shared.read(want)
            if tensors is None:
                return False
            _check_digest(want, weights_digest(tensors))
        except WeightsFault as error:
            record.faults.append(f"shared memory {self.shared.directory}: {error}")
            return False
        self._held, self._staged = (want, tensors), None
        return True

    def _built(self, want: PolicyVersion, record: FetchStats, deadline_s: float) -> None:
        """Hold a version made of chunks; where a manifest misleads, try those of other sources."""
        gather = ChunkFetcher(
            self.sources,
            self._cache,
            record,
            avoided=self._avoided,
            order=self._order,
            deadline_s=deadline_s,
        )
        misleading: set[str] = set()
        while True:
            plan = self._plan(want, gather, misleading)
            record.num_steps = len(plan)
            try:
                staged = self._followed(plan, gather)
            except _BadPlan as error:
                for source in error.sources:
                    gather.blame(source, f"its manifests do not lead to {name_of(want)}: {error}")
                    misleading.add(source.name)
                continue  # until no source is left, of whom the plan then says so
            self._held, self._staged = (want, tensors_of(staged.entries, staged.flat_buffer)), staged
            return

    def _plan(self, want: PolicyVersion, gather: ChunkFetcher, misleading: set[str]) -> list[_Step]:
        """Return the steps, in order, that fetch the fewest bytes: from what is held, or from one that is whole."""
        held, at = self.held, want
        walked: list[_Step] = []
        best: list[_Step] | None = None
        cost = best_cost = 0
        while len(walked) < MAX_STEPS:
            try:
                manifest, source = gather.manifest(at, misleading)
            except WeightsFault:
                if best is None:
                    raise
                break  # it might have led to what is held, but there is another plan
            whole, delta = manifest.whole, manifest.delta
            if whole is not None and (best is None or cost + whole.size < best_cost):
                best, best_cost = [*walked, _Step(manifest, whole, source)], cost + whole.size
            if delta is None or delta.base is None:
                break
            leads_on = held is not None and held.lineage == at.lineage and held.number < at.number
            if best is not None and (not leads_on or cost + delta.size >= best_cost):
                break
            walked.append(_Step(manifest, delta, source))
            cost, at = cost + delta.size, delta.base
            if at == held:
                best = walked
                break
        if best is None:
            raise WeightsFault(f"{name_of(want)} cannot be had: {len(walked)} versions back, none can be had whole")
        return best[::-1]

    def _followed(self, plan: list[_Step], gather: ChunkFetcher) -> _Staged:
        """Make a version step by step in a copy. Raises _BadPlan where it is not the one that was wanted."""
        last = plan[-1].manifest
        sources = [step.source for step in plan]
        if any(layout_of(step.manifest.tensors) != layout_of(last.tensors) for step in plan):
            raise _BadPlan("versions of one chain have different tensors", sources)
        flat_buffer = np.empty(last.num_bytes, np.uint8)
        if plan[0].way.base is not None:
            base = self._base()
            if layout_of(base.entries) != layout_of(last.tensors):
                raise _BadPlan("it has other tensors than the version held", sources)
            flat_buffer[:] = base.flat_buffer
        for step in plan:
            coded, begin = _CodedBytes(step.way, gather), 0
            for part in step.way.parts:
                end = begin + part.num_bytes
                data = coded.take(part.size)
                try:
                    decode(part.coding, data, flat_buffer[begin:end], part.word)
                except WeightsFault as error:
                    raise _BadPlan(str(error), [step.source]) from error
                begin = end
        digests = piece_digests(last.tensors, flat_buffer)
        if wrong := [entry.name for entry in last.tensors if digests[entry.name] != entry.digest]:
            raise _BadPlan(f"{len(wrong)} tensors have another digest, {wrong[0]} is one", sources)
        return _Staged(last.version, last.tensors, flat_buffer)

    def _base(self) -> _Staged:
        """What is held, as one stretch."""
        if self._staged is None:
            assert self._held is not None, "a plan begins at a version that is not held"
            version, tensors = self._held
            entries, flat_buffer = flattened(tensors)
            _check_digest(version, tensors_digest(entries))
            self._staged = _Staged(version, entries, flat_buffer)
        return self._staged


class _CodedBytes:
    """The coded bytes of a way, in order, chunk by chunk."""

    def __init__(self, way: Encoding, gather: ChunkFetcher) -> None:
        self._chunks = iter(way.chunks)
        self._gather = gather
        self._waiting = bytearray()

    def take(self, size: int) -> bytes:
        """Return the next bytes. A manifest's sizes add up, so that there are as many."""
        while len(self._waiting) < size:
            self._waiting += self._gather.chunk(next(self._chunks))
        found = bytes(self._waiting[:size])
        del self._waiting[:size]
        return found


def _check_digest(version: PolicyVersion, digest: str) -> None:
    if digest != version.digest:
        raise WeightsFault(f"these are not the tensors of {name_of(version)}: their digest is {digest[:8]}")
