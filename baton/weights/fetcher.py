"""The worker's side of weight transfer: a fetch either replaces the version that the worker holds with the requested
version, or changes nothing. A fetch has five steps:

1. Follow manifests from the requested version back to the held version or a keyframe. Choose the encodings with the
   fewest bytes.
2. Get the chunks of these encodings from the sources, and verify each chunk before use (`chunk_fetcher.py`).
3. Apply the parts to a copy of the held bytes (`version_writer.py`).
4. Compare every tensor of the copy with its digest.
5. Hold the copy instead of the old version.

A fault in any step raises an error and leaves the held version unchanged; the next fetch starts from the beginning. The
held version and its copy are memory-mapped files (`flat_buffer.py`). In addition, a fetch needs memory for four chunks,
for n + 1 parts, and for the changed elements of n + 1 tensors, where n is the number of decoding threads (`CODERS`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.clock import Clock, in_order
from baton.errors import WeightsFault
from baton.policy.tensors import weights_digest
from baton.types import PolicyVersion
from baton.weights.bitstream import Pieces
from baton.weights.chunk_fetcher import ChunkFetcher, FetchStats
from baton.weights.flat_buffer import flattened, layout_of, tensors_of
from baton.weights.manifest import (
    MAX_MANIFEST_BYTES,
    Encoding,
    Manifest,
    TensorEntry,
    check_version,
    decode_manifest,
    name_of,
    tensors_digest,
)
from baton.weights.sources import WeightsSource
from baton.weights.version_files import FlatFile, VersionFiles
from baton.weights.version_writer import DamagedPart, VersionWriter

MAX_STEPS = 4096
"""Maximum number of versions that one fetch decodes one after another, ending with the requested version."""
MAX_PLAN_BYTES = 4 * MAX_MANIFEST_BYTES
"""A plan whose manifests have at least this number of bytes is not extended. This bounds the memory for the manifests
of hostile sources. A plan keeps manifests encoded, because decoded manifests take up to eight times as much memory."""


@dataclass(frozen=True, slots=True)
class _Staged:
    """A version in the form of one flat buffer."""

    entries: tuple[TensorEntry, ...]
    file: FlatFile


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a plan: the encoded manifest of a version, the encoding to apply, and the manifest's source."""

    manifest: bytes
    is_whole: bool
    source: WeightsSource

    def decoded(self) -> tuple[Manifest, Encoding]:
        """Return the manifest, and the encoding to apply."""
        manifest = decode_manifest(self.manifest)
        way = manifest.whole if self.is_whole else manifest.delta
        assert way is not None, "_plan chose an encoding that the manifest has"
        return manifest, way


class _BadPlan(Exception):
    """The chunks match their manifests, but the tensors do not match the version's digest: a manifest is wrong."""

    def __init__(self, text: str, sources: list[WeightsSource]) -> None:
        super().__init__(text)
        self.sources = sources


class Fetcher:
    """Holds one version and fetches further versions. The methods block, so call them in a thread."""

    def __init__(self, sources: Sequence[WeightsSource], *, shared: VersionFiles | None = None) -> None:
        """`shared`: files of the versions that a trainer on this machine publishes, used before `sources`."""
        self.sources, self.shared = list(sources), shared
        self._avoided: set[str] = set()
        """Names of the sources that sent wrong data in any fetch. These sources are queried last."""
        self._timeouts: dict[str, tuple[int, Clock]] = {}
        """Argument `timeouts` of `ChunkFetcher`, kept from one fetch to the next."""
        self._held: tuple[PolicyVersion, Mapping[str, torch.Tensor]] | None = None
        self._staged: _Staged | None = None
        """The held version as a flat buffer; None if this version is mapped from `shared`."""
        self._free: FlatFile | None = None
        """The file of the version before the held one. Unless tensors of that old version are still in use, the next
        version is written into this file, so that the system need not allocate new pages."""
        self._lock = threading.Lock()
        self.last: FetchStats | None = None
        """Statistics of the last fetch."""

    @property
    def held(self) -> PolicyVersion | None:
        """The held version; None before the first `fetch`."""
        return None if self._held is None else self._held[0]

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name → tensor of the held version. The caller must not change the tensors."""
        return {} if self._held is None else self._held[1]

    def fetch(self, want: PolicyVersion, *, deadline_s: float) -> Mapping[str, torch.Tensor]:
        """Fetch and verify a version, hold it, and return its tensors. The caller must not change these tensors. Raises
        WeightsFault when no source sends a complete and correct version, and DeadlineExceeded after `deadline_s`. After
        an error the held version is the same as before."""
        with self._lock:
            self.last = record = FetchStats(want)
            check_version(want)
            if self.held != want and not self._mapped(want, record):
                self._built(want, record, deadline_s)
            return self.tensors

    def _mapped(self, want: PolicyVersion, record: FetchStats) -> bool:
        """Hold the version from its file on this machine and return True; False if the file is absent or damaged."""
        if self.shared is None:
            return False
        try:
            tensors = self.shared.read(want)
            if tensors is None:
                return False
            _check_digest(want, weights_digest(tensors))
        except WeightsFault as error:
            record.faults.append(f"the versions in {self.shared.directory}: {error}")
            return False
        self._held, self._staged, self._free = (want, tensors), None, None
        return True

    def _built(self, want: PolicyVersion, record: FetchStats, deadline_s: float) -> None:
        """Construct a version from chunks and hold it. If a manifest is wrong, try the manifests of other sources."""
        chunk_fetcher = ChunkFetcher(
            self.sources, record, avoided=self._avoided, timeouts=self._timeouts, deadline_s=deadline_s
        )
        misleading: set[str] = set()
        while True:
            plan = self._plan(want, chunk_fetcher, misleading)
            record.num_steps = len(plan)
            try:
                staged = self._followed(plan, chunk_fetcher)
            except _BadPlan as error:
                for source in error.sources:
                    chunk_fetcher.blame(source, f"its manifests do not lead to {name_of(want)}: {error}")
                    misleading.add(source.name)
                # the loop ends: each round excludes a source, and `_plan` raises WeightsFault when no source is left
                continue
            self._free = None if self._staged is None else self._staged.file
            self._held, self._staged = (want, tensors_of(staged.entries, staged.file.lend())), staged
            return

    def _plan(self, want: PolicyVersion, chunk_fetcher: ChunkFetcher, misleading: set[str]) -> list[_Step]:
        """Return the plan with the fewest bytes to fetch: steps from the held version or a keyframe to the requested
        one."""
        held, at = self.held, want
        walked: list[_Step] = []
        best: list[_Step] | None = None
        cost = best_cost = num_bytes = 0
        while len(walked) < MAX_STEPS and num_bytes < MAX_PLAN_BYTES:
            try:
                manifest, data, source = chunk_fetcher.manifest(at, misleading)
            except WeightsFault:
                if best is None:
                    raise
                break  # a keyframe was found before, so a plan exists without this manifest
            whole, delta = manifest.whole, manifest.delta
            if whole is not None and (best is None or cost + whole.size < best_cost):
                best, best_cost = [*walked, _Step(data, True, source)], cost + whole.size
            if delta is None or delta.base is None:
                break
            leads_on = held is not None and held.lineage == at.lineage and held.number < at.number
            if best is not None and (not leads_on or cost + delta.size >= best_cost):
                break
            walked.append(_Step(data, False, source))
            num_bytes += len(data)
            cost, at = cost + delta.size, delta.base
            if at == held:
                best = walked
                break
        if best is None:
            raise WeightsFault(f"{name_of(want)} is not available: no keyframe among the last {len(walked)} versions")
        return best[::-1]

    def _followed(self, plan: list[_Step], chunk_fetcher: ChunkFetcher) -> _Staged:
        """Apply the steps of a plan to a copy of the held version, or to an empty buffer if the plan starts at a
        keyframe; return the result. Raises _BadPlan if the result is not the requested version."""
        last, last_way = plan[-1].decoded()
        sources = [step.source for step in plan]
        copy, self._free = self._free, None
        is_written = copy is not None and copy.bytes.size == last.num_bytes and not copy.is_lent
        if copy is None or not is_written:
            copy = FlatFile.unnamed(last.tensors)
        before, digests = copy.bytes, dict[str, str]()
        if not plan[0].is_whole:
            base = self._base()
            if layout_of(base.entries) != layout_of(last.tensors):
                raise _BadPlan("the version has other tensors than the held one", sources)
            before = base.file.bytes
        for step in plan:
            manifest, way = (last, last_way) if step is plan[-1] else step.decoded()
            if layout_of(manifest.tensors) != layout_of(last.tensors):
                raise _BadPlan("the versions of the plan have different tensors", sources)
            is_mapped = is_written and copy.allows_mapped_writes
            writer = VersionWriter(copy, before, is_mapped, step is plan[-1])
            try:
                digests = writer.write(way, last.tensors, _CodedBytes(way, chunk_fetcher).take)
            except DamagedPart as error:
                raise _BadPlan(str(error), [step.source]) from error
            before, is_written = copy.bytes, True
        if wrong := [entry.name for entry in last.tensors if digests[entry.name] != entry.digest]:
            raise _BadPlan(f"{len(wrong)} tensors have another digest, among them {wrong[0]}", sources)
        return _Staged(last.tensors, copy)

    def _base(self) -> _Staged:
        """Return the held version as a flat buffer."""
        if self._staged is None:
            assert self._held is not None, "a plan starts from a held version, but none is held"
            version, tensors = self._held
            entries, file = flattened(tensors, FlatFile.unnamed)
            _check_digest(version, tensors_digest(entries))
            self._staged = _Staged(entries, file)
        return self._staged


class _CodedBytes:
    """Reads the bytes of an encoding in order. While parts are decoded, up to two chunks are fetched in advance."""

    def __init__(self, way: Encoding, chunk_fetcher: ChunkFetcher) -> None:
        self._chunks = in_order(chunk_fetcher.chunk, way.chunks, lambda chunk: chunk.size, threads=2)
        self._rest = memoryview(b"")
        """The bytes of the last chunk that have not been read."""

    def take(self, size: int) -> Pieces:
        """Return the next `size` bytes. `check_manifest` has checked that the chunks contain enough bytes."""
        found: Pieces = []
        while size:
            if not self._rest:
                self._rest = memoryview(next(self._chunks))
            found.append(self._rest[:size])
            self._rest = self._rest[size:]
            size -= len(found[-1])
        return found


def _check_digest(version: PolicyVersion, digest: str) -> None:
    if digest != version.digest:
        raise WeightsFault(f"the tensors are not those of {name_of(version)}: their digest is {digest[:8]}")
