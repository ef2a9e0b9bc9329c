"""Generate the blocking gRPC client from the one for asyncio, by `unasync`.

    python tools/generate_blocking_client.py [--check]

With --check it says whether the committed file is current, and writes nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

FOLDER = Path(__file__).resolve().parents[1] / "services" / "client" / "src" / "pagestream_client" / "grpc"
SOURCE, GENERATED = FOLDER / "async_client.py", FOLDER / "client.py"
NAMES = {
    "AsyncClient": "Client",
    "AsyncStream": "Stream",
    "AsyncClosing": "Closing",
    "aclose": "close",
    "await_status_async": "await_status",
    "connect_async": "connect",
    "read_async": "read",
    "sleep_async": "sleep",
}
"""Beside those of `unasync`."""
PHRASES = {
    "The client over gRPC for asyncio, and its streams. `client.py`, for programs that block, is generated from this "
    "file:\n`python tools/generate_blocking_client.py`.": "The client over gRPC for programs that block, and its "
    "streams. Generated from `async_client.py`: edit that, and\nrun `python tools/generate_blocking_client.py`.",
    "Use it in one event loop, as `async with AsyncClient": "Use it from any number of threads, as `with Client",
    "leaving its `async with` block": "leaving its `with` block",
    "One task reads it.": "One thread reads it; any thread may close it.",
    "or `aclose`, ends it": "or `close`, ends it",
    "as `aclose` does": "as `close` does",
    "`AsyncStream.accepted`": "`Stream.accepted`",
}
"""What docstrings say otherwise: `unasync` leaves them as they are."""


def generated() -> str:
    """Return the text of the blocking client."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "source", GENERATED.name), Path(folder, "made", GENERATED.name)
        source.parent.mkdir()
        text = SOURCE.read_text(encoding="utf-8")
        for phrase, other in PHRASES.items():
            if phrase not in text:
                raise SystemExit(f"{SOURCE.name} does not say {phrase!r} any more: mend PHRASES")
            text = text.replace(phrase, other)
        source.write_text(text, encoding="utf-8")
        rule = unasync.Rule(fromdir="/source/", todir="/made/", additional_replacements=NAMES)
        unasync.unasync_files([str(source)], [rule])
        text = made.read_text(encoding="utf-8")
    for step in (["check", "--select", "I,C416", "--fix", "--unsafe-fixes", "-q"], ["format", "-q"]):
        ruff = [sys.executable, "-m", "ruff", *step, "--stdin-filename", str(GENERATED), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> int:
    """Write the file, or compare it. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the file is not current")
    arguments = parser.parse_args()
    text = generated()
    if not arguments.check:
        GENERATED.write_text(text, encoding="utf-8")
    elif not GENERATED.exists() or GENERATED.read_text(encoding="utf-8") != text:
        print(f"{GENERATED} is not current: run python tools/generate_blocking_client.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
