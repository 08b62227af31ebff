"""Fetches manifests and chunks from untrusted sources, verifies them, and records the received bytes and the faults."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from blake3 import blake3

from baton.clock import Clock, retry_wait_s, time_left
from baton.errors import BatonError, DeadlineExceeded, WeightsFault
from baton.types import PolicyVersion
from baton.weights.manifest import Chunk, Manifest, decode_manifest, name_of
from baton.weights.sources import WeightsSource

Got = TypeVar("Got")
MAX_ROUNDS: Final = 5
"""Maximum number of times that all sources are asked for one chunk."""
FIRST_WAIT_S: Final = 0.5
"""Delay in seconds before the second round. The delay doubles with each further round."""
FIRST_PAUSE_S: Final = 60.0
LONGEST_PAUSE_S: Final = 3600.0
"""Seconds for which a source is queried after the others because it did not answer in time. The time doubles with each
further timeout until the source sends a chunk. Without this pause, a relay that a worker cannot reach would delay each
version by its timeout."""


class _NoAnswer(WeightsFault):
    """No source sent the data, but a later attempt may succeed: a source could not be reached, or was too busy."""


class _Silent(_NoAnswer):
    """A source did not answer in time. All sources are asked only once more, because a round may take this long."""


@dataclass(slots=True)
class FetchStats:
    """Statistics of one fetch, successful or not."""

    want: PolicyVersion
    num_bytes: int = 0
    """Number of received bytes of chunks and manifests, including refused data."""
    faults: list[str] = field(default_factory=list)
    """Descriptions of faults, each of which begins with the name of the source."""
    num_steps: int = 0
    """Number of encodings that the fetch applies one after another; each encoding produces one version. 0 if the fetch
    needed no chunk."""


class ChunkFetcher:
    """Requests data from one source after another until an answer passes verification. Each fetch creates its own
    ChunkFetcher, which sends one request at a time, even if several threads use it."""

    def __init__(
        self,
        sources: Sequence[WeightsSource],
        record: FetchStats,
        *,
        avoided: set[str],
        timeouts: dict[str, tuple[int, Clock]],
        deadline_s: float,
    ) -> None:
        """The fetch may take `deadline_s` seconds from this call on. Sources in `avoided` are queried last; `blame`
        adds a source to `avoided`. `timeouts`: name of a source → number of timeouts since its last chunk, and the
        seconds left in which it is queried after the others."""
        self._sources, self.record, self._avoided = sources, record, avoided
        self._timeouts, self._silent = timeouts, set[str]()
        """Names of sources that could not be reached, or did not answer in time, in this fetch. They are queried after
        other sources that are not in `avoided`, because each attempt may take as long as their timeout."""
        self._order, self._lock = random.Random(), threading.Lock()
        self._deadline_s, self._left_s = deadline_s, time_left(deadline_s)

    def manifest(self, version: PolicyVersion, without: set[str]) -> tuple[Manifest, bytes, WeightsSource]:
        """Return a version's manifest, the manifest's bytes, and the source that sent it. Sources named in `without`
        are not queried. Raises WeightsFault when no source sends a valid manifest."""

        def check(data: bytes) -> tuple[Manifest, bytes]:
            manifest = decode_manifest(data)
            if manifest.version != version:
                raise WeightsFault(f"the source sent the manifest of {name_of(manifest.version)}")
            return manifest, data

        asked = [source for source in self._sources if source.name not in without]
        what = f"the manifest of {name_of(version)}"
        with self._lock:
            (manifest, data), source = self._first(asked, lambda source: source.manifest(version), check, what)
        return manifest, data, source

    def chunk(self, chunk: Chunk) -> bytes:
        """Return a chunk's verified bytes. Raises WeightsFault when no source sends the chunk. If a source could not be
        reached, or was too busy, all sources are asked again after a delay."""

        def check(data: bytes) -> bytes:
            if len(data) != chunk.size:
                raise WeightsFault(f"got {len(data)} bytes instead of {chunk.size}")
            if blake3(data).hexdigest() != chunk.digest:
                raise WeightsFault(f"the {chunk.size} bytes have another digest")
            return data

        def ask(source: WeightsSource) -> bytes:
            return source.chunk(chunk.digest, chunk.size)

        num_failed = 0
        while True:
            try:
                with self._lock:
                    data, source = self._first(self._sources, ask, check, f"chunk {chunk.digest[:8]}")
                    self._timeouts.pop(source.name, None)
                    return data
            except _NoAnswer as error:
                num_failed += 1
                if num_failed >= (2 if isinstance(error, _Silent) else MAX_ROUNDS):
                    raise
            wait_s = retry_wait_s(num_failed, first_s=FIRST_WAIT_S, longest_s=self._deadline_s)
            time.sleep(max(0.0, min(wait_s, self._left_s())))  # without the lock: other chunks may arrive

    def blame(self, source: WeightsSource, what: str) -> None:
        """Record that a source sent wrong data; from now on, this source is queried last."""
        self.record.faults.append(f"{source.name}: {what}")
        self._avoided.add(source.name)

    def _is_late(self, source: WeightsSource) -> bool:
        """Return whether a source failed in this fetch, or timed out a short time ago."""
        _, pause_left_s = self._timeouts.get(source.name, (0, lambda: 0.0))
        return source.name in self._silent or pause_left_s() > 0

    def check_deadline(self, waited_for: str) -> None:
        if self._left_s() < 0:
            said = "; ".join(self.record.faults[-3:]) or "no fault"
            raise DeadlineExceeded(
                f"{name_of(self.record.want)} was not complete after {self._deadline_s:g} s, waiting for {waited_for} "
                f"(faults so far: {said})"
            )

    def _first(
        self,
        sources: Sequence[WeightsSource],
        ask: Callable[[WeightsSource], bytes],
        check: Callable[[bytes], Got],
        what: str,
    ) -> tuple[Got, WeightsSource]:
        """Return the first answer that passes `check`, and its source. Raises _NoAnswer, a WeightsFault, if a later
        attempt may succeed."""
        # The order of equally distant sources is random, so that the load of many workers is spread over the sources.
        shuffled = self._order.sample(list(sources), len(sources))

        def rank(source: WeightsSource) -> tuple[bool, bool, int]:
            return source.name in self._avoided, self._is_late(source), source.distance

        fault: type[WeightsFault] = WeightsFault
        for source in sorted(shuffled, key=rank):
            self.check_deadline(f"{what} from {source.name}")
            try:
                data = ask(source)
            except (OSError, BatonError) as error:
                self.record.faults.append(f"{source.name}: did not send {what}: {error}")
                if isinstance(error, OSError | DeadlineExceeded):
                    self._silent.add(source.name)
                if isinstance(error, DeadlineExceeded) or isinstance(error.__cause__, DeadlineExceeded):
                    times = self._timeouts.get(source.name, (0, None))[0] + 1
                    pause_s = retry_wait_s(times, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
                    self._timeouts[source.name] = times, time_left(pause_s)
                if isinstance(error, DeadlineExceeded):
                    fault = _Silent
                elif isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and fault is not _Silent:
                    fault = _NoAnswer
                continue
            self.record.num_bytes += len(data)
            try:
                return check(data), source
            except WeightsFault as error:
                self.blame(source, f"refused {what}: {error}")
        self.check_deadline(f"{what} from any source")
        asked = ", ".join(source.name for source in sources) or "no source"
        raise fault(
            f"{name_of(self.record.want)} is not available: no source sent {what} ({asked}): "
            + "; ".join(self.record.faults[-len(self._sources) :])
        )
