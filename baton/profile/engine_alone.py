"""The engine alone: the measurements from which `baton bench rollout` computes its bounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.rollout.controller import PromptSource
from baton.rollout.engine import Engine
from baton.types import FromWorker, Lease, Report, SamplingParams, Trajectory

_PROBE_TOKENS = 12
"""Number of tokens of each row in the measurement of full decode steps (all slots in use). The last step is excluded,
because it also reports all rows."""
_UNCOUNTED = 3
"""Number of steps at the start that are excluded. The first step admits the rows; the following steps are slow, because
the processor's caches still contain other data."""


@dataclass(frozen=True)
class Work:
    """An amount of decoding: the number of generated tokens, and the number of positions that each token attends to,
    summed over the tokens."""

    tokens: int = 0
    positions: int = 0

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]]) -> Work:
        """`lengths`: (prompt tokens, response tokens) of each trajectory."""
        found = [(n, n * (2 * prompt + n - 1) // 2) for prompt, n in lengths]
        return cls(sum(tokens for tokens, _ in found), sum(positions for _, positions in found))

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.positions + other.positions)

    def __sub__(self, other: Work) -> Work:
        return Work(self.tokens - other.tokens, self.positions - other.positions)


class EngineAlone:
    """An engine with a queue that is never empty. The trajectories of a group share a prompt, as in the measured
    rollout modes."""

    def __init__(
        self,
        engine: Engine,
        length: Callable[[int, int], int],
        prompts: PromptSource,
        group_size: int,
        clock: Callable[[], float],
    ) -> None:
        """`length`: number of response tokens, by group id and sample index."""
        self._engine, self._length, self._prompts, self._clock = engine, length, prompts, clock
        self._group_size = group_size
        self._leases: dict[int, tuple[int, int]] = {}
        """Lease id → (prompt tokens, response tokens received so far)."""
        self._num_leased = 0
        self._prompt_ids: tuple[int, ...] = ()
        self.work, self.seconds = Work(), 0.0

    def run(self, tokens: int, *, is_counted: bool = True) -> None:
        """Generate at least `tokens` tokens."""
        work, seconds = Work(), 0.0
        while work.tokens < tokens:
            leases = [self._next_lease() for _ in range(2 * self._engine.slots - len(self._leases))]
            begin_s = self._clock()
            for lease in leases:
                self._engine.submit(lease)
            messages = self._engine.step()
            seconds += self._clock() - begin_s
            work += self._received(messages)
        if is_counted:
            self.work, self.seconds = self.work + work, self.seconds + seconds

    def _next_lease(self) -> Lease:
        group_id, index = divmod(self._num_leased, self._group_size)
        if not index:
            _, self._prompt_ids = self._prompts.take()
        lease_id, self._num_leased = self._num_leased, self._num_leased + 1
        self._leases[lease_id] = (len(self._prompt_ids), 0)
        sampling = SamplingParams(self._length(group_id, index))
        trajectory = Trajectory(group_id, index, self._prompt_ids)
        return Lease(lease_id, trajectory, sampling, 1, self._engine.version.number, is_exact=False)

    def _received(self, messages: Sequence[FromWorker]) -> Work:
        found = Work()
        for message in messages:
            assert isinstance(message, Report)
            prompt, before = self._leases.pop(message.lease_id)
            now = before + sum(len(segment.token_ids) for segment in message.segments)
            found += Work.of([(prompt, now)]) - Work.of([(prompt, before)])
            if message.finish_reason is None:
                self._leases[message.lease_id] = (prompt, now)
        return found


def full_steps_of(engine: Engine, longest: int, clock: Callable[[], float]) -> list[tuple[int, float]]:
    """Return (mean position of the rows, seconds) of decode steps with all slots in use, for three mean positions. The
    time is the median of several steps. The rows have four different lengths, because the rows of a run are not equally
    long."""
    slots, found = engine.slots, []
    params = SamplingParams(_PROBE_TOKENS)
    for mean in (longest // 8, longest // 4, longest // 2):
        lengths = [max(1, mean * part // 4) for part in (1, 3, 5, 7)]
        for index in range(slots):
            trajectory = Trajectory(0, index, (1,) * lengths[index % 4])
            engine.submit(Lease(index, trajectory, params, 0, engine.version.number, is_exact=False))
        seconds = []
        for _ in range(_PROBE_TOKENS):
            begun, begin_s = engine.stats.decoded_tokens, clock()
            engine.step()
            seconds.append(clock() - begin_s)
            assert engine.stats.decoded_tokens - begun == slots, "a row of the full steps ended early"
        found.append((sum(lengths) // 4 + _PROBE_TOKENS // 2, statistics.median(seconds[_UNCOUNTED:-1])))
    return found
