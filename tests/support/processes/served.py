"""`pagestream serve` in a process of its own, with what it writes to serve.json."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagestream_cli import ProcessRecord, ServeRecord, read_record
from support.processes.part import Part, StackError
from support.processes.waiting import LIMIT_S, wait_until


class Served:
    """A `pagestream serve` that runs."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"

    @property
    def record(self) -> ServeRecord:
        """What serve.json holds now. StackError after serve's end."""
        record = read_record(self.data / "serve.json")
        if record is None:
            raise StackError("serve has ended")
        return record

    def process(self, name: str) -> ProcessRecord:
        """Return what serve.json holds of one part; its pid is None while it restarts."""
        return next(process for process in self.record.processes if process.name == name)


@contextmanager
def running_serve(folder: Path, *options: str) -> Iterator[Served]:
    """Run `pagestream serve` with free ports and float32 below `folder`; yield when it is ready.

    Raises:
        StackError: it has ended; the message is its log.
    """
    served = Served(folder)
    command = [sys.executable, "-m", "pagestream_cli", "serve", "--http-port", "0", "--grpc-port", "0"]
    command += ["--data-dir", str(served.data), "--dtype", "float32", *options]
    part = Part("serve", command, folder / "serve.log")

    def is_ready() -> bool:
        if not part.is_alive():
            raise StackError(part.log.read_text())
        record = read_record(served.data / "serve.json")
        return record is not None and record.ready

    part.start()
    try:
        wait_until(is_ready, "serve is ready")
        yield served
    finally:
        part.signal(signal.SIGTERM)
        part.wait(LIMIT_S)
