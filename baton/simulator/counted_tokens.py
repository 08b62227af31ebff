"""Tokens of a simulated trajectory, which have a position but no content. A simulated run therefore uses the leases,
reports and trajectories of a live run, and a trajectory of any length takes the memory of a few numbers."""

from __future__ import annotations

from typing import Any

from baton.types import Segment, TokenColumn, Trajectory


class CountedTokens(TokenColumn[Any]):
    """Consecutive tokens. Each value is the token's position, or the negative position for logprobs: two workers that
    generate the same trajectory generate equal tokens."""

    __slots__ = ()
    _buffer: range  # type: ignore[assignment]

    def __init__(self, positions: range) -> None:
        self._buffer, self._start, self._stop = positions, 0, len(positions)

    def appended(self, values: Any) -> CountedTokens:
        mine, other = self._buffer, values._buffer
        assert other.start == mine.stop, f"tokens from {other.start} on cannot follow tokens up to {mine.stop}"
        return CountedTokens(range(mine.start, other.stop, mine.step))

    def __getitem__(self, index: Any) -> Any:
        found = self._buffer[index]
        return CountedTokens(found) if isinstance(found, range) else found


def counted_segment(start: int, num_tokens: int, version: int) -> Segment:
    """Return a segment of the tokens from position `start` on."""
    stop = start + num_tokens
    return Segment(CountedTokens(range(start, stop)), CountedTokens(range(-start, -stop, -1)), version)


def new_trajectory(group_id: int, sample_index: int, prompt: int) -> Trajectory:
    """Return a trajectory without tokens after its prompt of `prompt` tokens."""
    return Trajectory(group_id, sample_index, CountedTokens(range(prompt)))
