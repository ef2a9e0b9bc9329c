"""The coverage of every Python process of a test run, by the test that ran at that time.

`mutants.py` copies this module into the environment of a scratch checkout, where each process imports it at its start.
It measures where `MUTANTS_COVER` names a folder for the data; `MUTANTS_ROOT` is the checkout whose sources count.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

SOURCES = ("services/*/src/**", "operator/src/**", "kernels/src/**")
POLL_S = 0.1
SAVE_S = 1.0
"""Between two saves: what a killed process loses."""


class Cover:
    """The coverage of this process, saved at its end and once a second."""

    def __init__(self, folder: Path, root: str) -> None:
        self._folder = folder
        self._root = root
        self._exit = os._exit
        self._start()
        os.register_at_fork(after_in_child=self._restart)
        atexit.register(self._save)
        os._exit = self._save_and_exit

    def _start(self) -> None:
        import coverage

        self._coverage: Any = coverage.Coverage(
            data_file=str(self._folder / f"{os.getpid()}-{time.monotonic_ns()}.cov"),
            config_file=False,
            branch=True,
            include=[f"{self._root}/{below}" for below in SOURCES],
        )
        self._coverage.set_option("run:core", "ctrace")
        quiet = ["no-data-collected", "module-not-measured", "already-imported"]
        self._coverage.set_option("run:disable_warnings", quiet)
        self._coverage.start()

    def _restart(self) -> None:
        """Measure a forked process anew: the file is its parent's."""
        self._coverage.stop()
        self._start()
        self.follow()

    def switch(self, test: str) -> None:
        """Attribute what runs from now on to a test, and have other processes do so."""
        (self._folder / "current").write_text(test)
        self._coverage.switch_context(test)

    def follow(self) -> None:
        """Attribute what runs to the test that the process of pytest runs at that time."""
        threading.Thread(target=self._follow, name="coverage", daemon=True).start()

    def _follow(self) -> None:
        current, test, saved = self._folder / "current", "", time.monotonic()
        while True:
            running = current.read_text() if current.exists() else ""
            if running != test:
                test = running
                self._coverage.switch_context(test)
            if time.monotonic() > saved + SAVE_S:
                self._coverage.save()
                saved = time.monotonic()
            time.sleep(POLL_S)

    def _save(self) -> None:
        self._coverage.stop()
        self._coverage.save()

    def _save_and_exit(self, status: int) -> NoReturn:
        try:
            self._save()
        finally:
            self._exit(status)


COVER: Cover | None = None
if "MUTANTS_COVER" in os.environ:
    COVER = Cover(Path(os.environ["MUTANTS_COVER"]), os.environ["MUTANTS_ROOT"])
    if os.environ.pop("MUTANTS_PYTEST", None) is None:
        COVER.follow()
