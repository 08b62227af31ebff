"""Tokens of a simulated trajectory, which have a position and an origin. A simulated run therefore uses the leases,
reports and trajectories of a live run, and a trajectory of any length takes the memory of a few numbers."""

from __future__ import annotations

from typing import Any

from baton.types import Segment, TokenColumn

ORIGIN = 2**32
"""Difference between the values of tokens that have the same position and consecutive origins."""


class CountedTokens(TokenColumn[Any]):
    """Consecutive tokens. Each value is the token's position plus the origin times `ORIGIN`, or its negative for
    logprobs: engines with keyed noise have origin 0, so all of them generate equal tokens."""

    __slots__ = ()
    _buffer: range  # type: ignore[assignment]

    def __init__(self, positions: range) -> None:
        self._buffer, self._start, self._stop = positions, 0, len(positions)

    def appended(self, values: Any) -> TokenColumn[Any]:
        mine, first = self._buffer, values[0]
        if first == mine.stop and isinstance(values, CountedTokens):
            return CountedTokens(range(mine.start, values._buffer.stop, mine.step))
        assert not (first - mine.stop) % ORIGIN, f"tokens from {first} on cannot follow tokens up to {mine.stop}"
        return TokenColumn([*mine, *values])

    @property
    def origin(self) -> int:
        return abs(self._buffer[0]) // ORIGIN

    def __getitem__(self, index: Any) -> Any:
        found = self._buffer[index]
        return CountedTokens(found) if isinstance(found, range) else found


def counted_segment(start: int, num_tokens: int, version: int, origin: int = 0) -> Segment:
    """Return a segment of the tokens from position `start` on."""
    start += origin * ORIGIN
    stop = start + num_tokens
    return Segment(CountedTokens(range(start, stop)), CountedTokens(range(-start, -stop, -1)), version)
