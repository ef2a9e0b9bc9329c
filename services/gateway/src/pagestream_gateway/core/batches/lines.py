"""The lines of a file in Redis, read in slices."""

from codecs import BOM_UTF8
from typing import NamedTuple

from pagestream_batches.files import FileStore

_SLICE_BYTES = 256 * 1024


class Line(NamedTuple):
    """A line that is not empty."""

    number: int
    """From 1."""
    offset: int
    """Bytes before it in the file."""
    data: bytes
    """Without its end, and without the mark of byte order that some editors write first."""


class LineTooLong(Exception):  # noqa: N818 - says what is wrong with a file
    """A line has more bytes than a request may have."""

    def __init__(self, number: int, limit_bytes: int) -> None:
        super().__init__(f"line {number} has more than {limit_bytes} bytes")
        self.number = number
        self.limit_bytes = limit_bytes


class LineReader:
    """Reads a file's lines from one of them on. It holds two slices, or the longest line."""

    def __init__(
        self, files: FileStore, tag: str, file_id: str, *, max_bytes: int, offset: int = 0, number: int = 0
    ) -> None:
        """`offset`, `number`: behind the last line that was read before."""
        self.offset = offset
        """Bytes of the lines that were returned, and of empty ones between them."""
        self._files = files
        self._tag = tag
        self._file_id = file_id
        self._max_bytes = max_bytes
        self._number = number
        self._held = bytearray()
        self._is_at_end = False

    async def next(self, most_lines: int, most_bytes: int = _SLICE_BYTES) -> list[Line]:
        """Return some of the next lines, about `most_bytes` of them; none at the end.

        Raises LineTooLong, Unavailable; a retry goes on with the same line.
        """
        lines: list[Line] = []
        num_bytes = 0
        while len(lines) < most_lines and num_bytes < most_bytes:
            end = self._held.find(b"\n")
            if end < 0 and not self._is_at_end:
                if len(self._held) > self._max_bytes:
                    raise LineTooLong(self._number + 1, self._max_bytes)
                await self._read()
                continue
            if end < 0 and not self._held:
                break
            data = bytes(self._held[:end] if end >= 0 else self._held)
            if len(data) > self._max_bytes:
                raise LineTooLong(self._number + 1, self._max_bytes)
            del self._held[: len(data) + 1]
            num_marks = len(BOM_UTF8) if not self.offset and data.startswith(BOM_UTF8) else 0
            if data[num_marks:].strip():
                text = data[num_marks:].rstrip(b"\r")
                lines.append(Line(self._number + 1, self.offset + num_marks, text))
            self._number += 1
            self.offset += len(data) + 1
            num_bytes += len(data)
        return lines

    async def _read(self) -> None:
        place = self.offset + len(self._held)
        part = await self._files.read(self._tag, self._file_id, place, _SLICE_BYTES)
        self._is_at_end = len(part) < _SLICE_BYTES
        self._held += part
