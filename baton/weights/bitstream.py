"""Byte streams one after another in one block, each squeezed with zstd where that makes it smaller.

    number   7 bits a byte, the lowest first; the eighth says that more follow
    stream   of fewer than 16 bytes: itself; of others, number: squeezed bytes that follow, or 0 where those that
             follow are the stream itself; the bytes

A reader knows the length of each stream beforehand and makes no room for more, whatever the block claims.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from baton.errors import WeightsFault

Bytes = NDArray[np.uint8]

_LEVEL: Final = 1
"""Of zstd: what is squeezed here are symbols of no order, of which higher levels make nothing smaller."""
_SMALLEST: Final = 16
"""Shorter streams are not worth a frame."""
_WINDOW: Final = 2**23
"""Bytes of history that a frame may ask for; ours ask for less."""


class BitWriter:
    """Appends numbers and streams to a block."""

    def __init__(self) -> None:
        self._block = bytearray()
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=0, write_checksum=0
        )
        self._zstd = zstandard.ZstdCompressor(compression_params=parameters)

    def number(self, value: int) -> None:
        """Append a number ≥ 0."""
        while value > 127:
            self._block.append(128 | (value & 127))
            value >>= 7
        self._block.append(value)

    def stream(self, data: Bytes) -> None:
        """Append bytes; the reader knows how many."""
        raw = np.ascontiguousarray(data)
        if data.size < _SMALLEST:
            self._block += raw.data
            return
        squeezed = self._zstd.compress(raw.data)
        is_smaller = len(squeezed) < data.size
        self.number(len(squeezed) if is_smaller else 0)
        self._block += squeezed if is_smaller else raw.data

    def bits(self, bits: Bytes) -> None:
        """Append zeros and ones, eight to a byte."""
        self.stream(np.packbits(bits))

    def block(self) -> bytes:
        """Return all that was appended."""
        return bytes(self._block)


class BitReader:
    """Reads a block back. Every method raises WeightsFault where the block is not what a `BitWriter` wrote."""

    def __init__(self, block: bytes) -> None:
        self._block, self._at = memoryview(block), 0
        self._zstd = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS, max_window_size=_WINDOW)

    def number(self, limit: int) -> int:
        """Read a number of at most `limit`."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self._take_bytes(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                break
        if value > limit:
            raise WeightsFault(f"a coded part is damaged: a number of {value} where at most {limit} fits")
        return value

    def stream(self, size: int) -> Bytes:
        """Read a stream of `size` bytes."""
        squeezed = 0 if size < _SMALLEST else self.number(size)
        if not squeezed:
            return np.frombuffer(self._take_bytes(size), np.uint8)
        try:
            with self._zstd.stream_reader(self._take_bytes(squeezed)) as reader:
                data = reader.read(size + 1)
        except zstandard.ZstdError as error:
            raise WeightsFault(f"a coded part is damaged: {error}") from error
        if len(data) != size:
            raise WeightsFault(f"a coded part is damaged: a stream of {size} bytes is of another size")
        return np.frombuffer(data, np.uint8)

    def bits(self, count: int) -> Bytes:
        """Read `count` zeros and ones."""
        return np.unpackbits(self.stream(-(-count // 8)), count=count)

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._block):
            raise WeightsFault(f"a coded part is damaged: {len(self._block) - self._at} bytes are left over")

    def _take_bytes(self, size: int) -> memoryview:
        found = self._block[self._at : self._at + size]
        if len(found) != size:
            raise WeightsFault("a coded part is damaged: it ends too early")
        self._at += size
        return found
