"""Results of kernel cases that passed, kept in the user's cache until a source that they rest on changes.

All checkouts share them: a file's name is a digest of what the results rest on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pagestream_engine.native_build import user_cache
from support.kernels import worker
from support.kernels.worker import REPOSITORY, Mode

from kernels import builds, cases, emulated

MOST_FILES = 8
"""That are kept of a mode: those of the last sources that it ran with."""
SOURCES = (
    *(Path(each.__file__) for each in (builds, cases, emulated, worker)),
    Path(__file__).with_name("test_interpreted.py"),
    *sorted((Path(worker.__file__).parent / "emulator").glob("*.py")),
)


def source_hash() -> str:
    """Changes with any source of the kernels, of the cases, or with the versions of python, torch and triton."""
    package = REPOSITORY / "kernels" / "src" / "pagestream_kernels"
    digest = hashlib.sha256(f"{sys.version} {version('torch')} {version('triton')}".encode())
    for path in (*sorted(package.rglob("*.py")), *SOURCES):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class ResultCache:
    """One append-only file of JSON lines per mode and source hash; several processes may append to it."""

    def __init__(self, mode: Mode | Literal["emulate"], directory: Path | None = None) -> None:
        folder = user_cache() / "kernel-cases" if directory is None else directory
        self._path = folder / f"{mode}-{source_hash()}.jsonl"
        self._mode = mode
        self._results: dict[str, Any] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:  # a campaign was killed while it wrote
                    continue
                self._results[entry["key"]] = entry["result"]

    def get(self, kernel: str, case: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a case that passed with these sources, or None."""
        return self._results.get(_key(kernel, case))

    def put(self, kernel: str, case: dict[str, Any], result: dict[str, Any]) -> None:
        """Remember a case that passed."""
        key = _key(kernel, case)
        self._results[key] = result
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = sorted(self._path.parent.glob(f"{self._mode}-*.jsonl"), key=lambda path: path.stat().st_mtime)
            for path in kept[: 1 - MOST_FILES]:
                path.unlink(missing_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "result": result}) + "\n")

    def once(self, kernel: str, case: dict[str, Any], run: Callable[[], object]) -> None:
        """Run a case that has not passed with these sources."""
        if self.get(kernel, case) is None:
            run()
            self.put(kernel, case, {})


def _key(kernel: str, case: dict[str, Any]) -> str:
    return json.dumps([kernel, case], sort_keys=True)
