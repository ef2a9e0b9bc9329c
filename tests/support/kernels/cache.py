"""Results of kernel cases that passed, kept under `.kernel-cache/` until a source that they rest on changes."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.kernels.worker import REPOSITORY, Mode

CACHE_DIR = REPOSITORY / ".kernel-cache"
SUPPORT_SOURCES = ("builds.py", "cases.py", "matmul.py", "plans.py", "worker.py")


def source_hash() -> str:
    """Changes with any source of the kernels, of the cases, or with the versions of python, torch and triton."""
    support = Path(__file__).parent
    package = REPOSITORY / "kernels" / "src" / "pagestream_kernels"
    digest = hashlib.sha256(f"{sys.version} {version('torch')} {version('triton')}".encode())
    for path in (*sorted(package.rglob("*.py")), *(support / name for name in SUPPORT_SOURCES)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class ResultCache:
    """One append-only file of JSON lines per mode and source hash; several processes may append to it."""

    def __init__(self, mode: Mode, directory: Path = CACHE_DIR) -> None:
        self._path = directory / f"{mode}-{source_hash()}.jsonl"
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
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "result": result}) + "\n")


def _key(kernel: str, case: dict[str, Any]) -> str:
    return json.dumps([kernel, case], sort_keys=True)
