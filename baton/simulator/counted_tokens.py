"""Tokens of a simulated trajectory. A token consists only of a position and a number called origin, so a trajectory of
any length takes the memory of a few numbers. Two engines or leases that generate different tokens have different
origins. The values are valid token ids, so that leases, reports, messages and journal of a simulated run have the
same form as in a live run."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.types import Lease, Report, Segment, TokenColumn

ORIGIN = 2**20
"""Difference between the values of two tokens with equal positions, if their origins differ by 1."""
NUM_ORIGINS = 2**11 - 1
"""The largest origin, chosen so that the values of all tokens are below 2^31."""


class CountedTokens(TokenColumn[Any]):
    """Consecutive tokens. A token's value is its position + origin · `ORIGIN`; its logprob is the negative of this
    value. Engines whose noise depends only on the trajectory have origin 0, so all of them generate equal tokens."""

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

    def __getitem__(self, index: Any) -> Any:
        found = self._buffer[index]
        return CountedTokens(found) if isinstance(found, range) else found


def counted_segment(start: int, num_tokens: int, version: int, origin: int = 0) -> Segment:
    """Return a segment of `num_tokens` tokens that begins at position `start`."""
    start += ((origin - 1) % NUM_ORIGINS + 1) * ORIGIN if origin else 0
    stop = start + num_tokens
    return Segment(CountedTokens(range(start, stop)), CountedTokens(range(-start, -stop, -1)), version)


def counted(message: Any) -> Any:
    """Convert the tokens of a decoded message to counted tokens."""
    match message:
        case Report(segments=segments):
            return msgspec.structs.replace(message, segments=tuple(map(_counted, segments)))
        case Lease(trajectory=known):
            known = msgspec.structs.replace(known, segments=tuple(map(_counted, known.segments)))
            return msgspec.structs.replace(message, trajectory=known)
        case _:
            return message


def _counted(segment: Segment) -> Segment:
    ids, count = segment.token_ids, len(segment.token_ids)
    is_run = ids[-1] - ids[0] == count - 1  # otherwise the segment has tokens of two leases
    return counted_segment(ids[0], count, segment.policy_version) if is_run else segment
