"""A decode step runs through the files that docs/architecture.md names, in their order.

All others that run a function of more than three lines lie in the parts (files or folders) that it names beside them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import CodeType, FrameType

import pagestream_engine
from pagestream_engine import LLM, SamplingParams

ROOT = Path(__file__).parents[3]
SOURCES = f"{Path(pagestream_engine.__file__).parent}/"
PAGE = (ROOT / "docs" / "architecture.md").read_text().partition("## Reading the engine")[2].partition("\n## ")[0]
REQUEST_PATH = re.findall(r"^\d\. `([\w/.]+)`", PAGE, re.MULTILINE)
_TABLE = re.findall(r"^\| `([\w/.]+)` \|.*\| (.+) \|$", PAGE, re.MULTILINE)
STEP_PATH = {file: re.findall(r"`([\w/.]+)`", parts) for file, parts in _TABLE}
"""The parts, files and folders, of each file that a step passes through."""


class Trace:
    """The engine's files that run a function of more than three lines, in order, and which of them called which."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.calls: set[tuple[str, str]] = set()

    def __enter__(self) -> Trace:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCES) or _num_lines(code) <= 3:
            return
        name = code.co_filename.removeprefix(SOURCES)
        self.files[name] = None
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(SOURCES):
            caller = caller.f_back
        if caller is not None:
            self.calls.add((caller.f_code.co_filename.removeprefix(SOURCES), name))


def _num_lines(code: CodeType) -> int:
    """Lines with code, without that of the `def`."""
    return len({line for _, _, line in code.co_lines() if line is not None}) - 1


def _row(name: str) -> int:
    """The row of the table that names a file, or a folder that it is in; -1 where none does."""
    for row, (file, parts) in enumerate(STEP_PATH.items()):
        if name == file or (name not in STEP_PATH and any(name.startswith(part) for part in parts)):
            return row
    return -1


def test_a_decode_step_passes_through_the_files_that_the_page_names() -> None:
    llm = LLM(ROOT / "deploy" / "demo-model" / "model", attention_backend="torch", deterministic=False)
    params = SamplingParams(temperature=0.7, max_tokens=8, seed=1)
    with Trace() as request:
        llm.generate(["Once upon a time"], params)
    llm.engine.add_request("a", [1, 2, 3], params)
    llm.engine.add_request("b", [4, 5, 6], params)
    for _ in range(3):
        llm.engine.step()
    with Trace() as step:
        llm.engine.step()
    llm.engine.close()

    assert len(REQUEST_PATH) <= 8
    assert set(REQUEST_PATH) <= request.files.keys()
    assert len(STEP_PATH) <= 6
    assert [name for name in step.files if name in STEP_PATH] == list(STEP_PATH)
    assert [name for name in step.files if _row(name) < 0] == [], "files that no row names"
    calls = [(caller, name) for caller, name in step.calls if name in STEP_PATH and caller != name]
    assert [call for call in calls if _row(call[0]) >= _row(call[1])] == [], "parts that call up the table"
