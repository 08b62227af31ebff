"""Writes numbers and byte streams one after another into a block, and reads them back. A stream is compressed with zstd
if compression makes it smaller.

* A number has 7 bits per byte, the lowest bits first. The eighth bit of a byte is set if another byte follows (LEB128).
* A stream shorter than 16 bytes is written as it is.
* Before a longer stream, the number of its compressed bytes is written, or 0 if the stream is not compressed.

The reader knows the length of each stream in advance, so a damaged block cannot make the reader allocate too much
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from baton.errors import WeightsFault

Bytes = NDArray[np.uint8]
Pieces = list[bytes | memoryview]
"""Consecutive bytes in several pieces, which are not joined: a join copies all bytes and may hold the GIL."""

_LEVEL: Final = 1
"""zstd level. Higher levels search for repeated sequences, which these streams do not contain."""
_SMALLEST: Final = 16
"""Streams with fewer bytes are not compressed, because the zstd header would cost more than compression saves."""
_WINDOW: Final = 2**23
"""Maximum zstd window in bytes, which bounds the reader's memory. `BitWriter` uses smaller windows."""


def size_of(pieces: Sequence[bytes | memoryview]) -> int:
    """Return the number of bytes in pieces."""
    return sum(map(len, pieces))


class BitWriter:
    """Appends numbers and streams to a block."""

    def __init__(self) -> None:
        self.block: Pieces = []
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=0, write_checksum=0
        )
        self._zstd = zstandard.ZstdCompressor(compression_params=parameters)

    def number(self, value: int) -> None:
        coded = bytearray()
        while value > 127:
            coded.append(128 | (value & 127))
            value >>= 7
        coded.append(value)
        self.block.append(bytes(coded))

    def stream(self, data: Bytes) -> None:
        """Append bytes, which must not change later. Their number is not written, so the reader must know it."""
        raw = np.ascontiguousarray(data)
        if data.size < _SMALLEST:
            self.block.append(raw.tobytes())
            return
        squeezed = self._zstd.compress(raw.data)
        is_smaller = len(squeezed) < data.size
        self.number(len(squeezed) if is_smaller else 0)
        self.block.append(squeezed if is_smaller else raw.data)

    def bits(self, bits: Bytes) -> None:
        """Append an array [n] of zeros and ones, packed eight to a byte."""
        self.stream(np.packbits(bits))


class BitReader:
    """Reads a block. Every method raises WeightsFault for a block that `BitWriter` cannot have written."""

    def __init__(self, block: bytes | memoryview) -> None:
        self._block, self._at = memoryview(block), 0
        self._zstd = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS, max_window_size=_WINDOW)

    def number(self, limit: int) -> int:
        """Read a number ≥ 0. Raises WeightsFault if the number exceeds `limit`."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self._take_bytes(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                break
        if value > limit:
            raise WeightsFault(f"an encoded part is damaged: got the number {value}, allowed are at most {limit}")
        return value

    def stream(self, size: int) -> Bytes:
        squeezed = 0 if size < _SMALLEST else self.number(size)
        if not squeezed:
            return np.frombuffer(self._take_bytes(size), np.uint8)
        try:
            with self._zstd.stream_reader(self._take_bytes(squeezed)) as reader:
                data = reader.read(size + 1)
        except zstandard.ZstdError as error:
            raise WeightsFault(f"an encoded part is damaged: {error}") from error
        if len(data) != size:
            # `read` returns at most size + 1 bytes, so the message cannot state the length of a longer stream.
            raise WeightsFault(f"an encoded part is damaged: a stream does not have the expected {size} bytes")
        return np.frombuffer(data, np.uint8)

    def bits(self, count: int) -> Bytes:
        return np.unpackbits(self.packed(count), count=count)

    def packed(self, count: int) -> Bytes:
        """Read `count` bits, eight to a byte."""
        return self.stream(-(-count // 8))

    def end(self) -> None:
        """Raise WeightsFault unless the whole block has been read."""
        if self._at != len(self._block):
            raise WeightsFault(f"an encoded part is damaged: {len(self._block) - self._at} bytes follow its end")

    def _take_bytes(self, size: int) -> memoryview:
        found = self._block[self._at : self._at + size]
        if len(found) != size:
            raise WeightsFault("an encoded part is damaged: it ends too early")
        self._at += size
        return found
