"""The output of a part: written to a log file, and passed on line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from pagestream_cli.supervisor.part import notify

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 14
"""A longer line is passed on in pieces; the file has it whole."""
MAX_FILE_BYTES = 64 << 20
"""Size at which the file is renamed to `<name>.1`, replacing an older one: a part uses at most twice this on disk."""
TAIL_LINES = 12


@contextlib.asynccontextmanager
async def pipe_reader() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """Open a pipe; yield its reader and the descriptor to write to, which the caller closes.

    asyncio's own pipe (`stdout=PIPE`) would report a process's end only after all its children, which hold the pipe
    too, have ended.
    """
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb")
    )
    try:
        yield reader, write_end
    finally:
        transport.close()


class PartOutput:
    """The output of one part over all its processes.

    It reads a pipe instead of giving the file to the part, so that the size of the file is bounded. Reading continues
    where the file cannot be written: a part whose pipe is full would block in its next write.
    """

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        self._path = path
        self._on_line = on_line
        self._file: FileIO | None = None
        self._lost_bytes = 0
        self._why_lost = ""
        self._rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines, for the error message of a part that cannot start."""

    def __enter__(self) -> Self:
        self._rotate()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def follow(self, pipe: asyncio.StreamReader) -> None:
        """Read the output of one process until its end."""
        while data := await pipe.read(READ_BYTES):
            self._keep(data)
            self._pass_on(data)
        if self._rest:
            self._pass_on(b"\n")

    def _rotate(self) -> FileIO:
        self._close()
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._file = FileIO(self._path, "w")  # unbuffered: output that a full disk refused must not be written later
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # all was written before; the descriptor is closed all the same
                file.close()

    def _keep(self, data: bytes) -> None:
        """Write to the file. What the disk does not accept is lost; the loss is marked in the file once that works."""
        written = 0
        try:
            file = self._file
            if file is None or file.tell() > MAX_FILE_BYTES:
                file = self._rotate()
            if self._lost_bytes:
                self._mark_loss(file)
            while written < len(data):
                written += file.write(data[written:])
        except OSError as error:
            self._lost_bytes += len(data) - written
            self._why_lost = str(error)

    def _mark_loss(self, file: FileIO) -> None:
        mark = f"[{self._lost_bytes} bytes of output were lost here: error in writing this file: {self._why_lost}]"
        file.write(f"\n{mark}\n".encode())
        self._lost_bytes = 0
        notify(self._on_line, mark)

    def _pass_on(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                self.tail.append(text)
                notify(self._on_line, text)
