"""What becomes of a part's output, above all where the disk does not take it."""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pagestream_cli.supervisor import PartOutput

LINE = "x" * 999
LIMIT_BYTES = 1 << 20


@contextmanager
def small_files() -> Iterator[None]:
    """A write past the limit fails, after what fits was written: as on a disk that becomes full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def write(output: PartOutput, text: str) -> None:
    """Let a process write this and end."""
    pipe = asyncio.StreamReader()
    pipe.feed_data(text.encode())
    pipe.feed_eof()
    await output.follow(pipe)


async def test_what_a_full_disk_refuses_is_passed_on_and_its_loss_is_marked_once(tmp_path: Path) -> None:
    path, lines = tmp_path / "a.log", list[str]()
    with PartOutput(path, lines.append) as output:
        with small_files():
            await write(output, f"{LINE}\n" * 2000)
        assert lines == [LINE] * 2000
        await write(output, "there is space again\n")
        await write(output, "the last line\n")
    *_, cut, mark, again, last = path.read_text().splitlines()
    assert path.read_text().startswith(f"{LINE}\n")
    assert mark.startswith(f"[{2000 * 1000 - LIMIT_BYTES} bytes of output were lost here: error in writing")
    assert cut == "x" * (LIMIT_BYTES % 1000)
    assert (again, last) == ("there is space again", "the last line")
    assert lines[2000:] == [mark, again, last]


async def test_a_listener_that_fails_loses_its_own_line_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []

    def hear(text: str) -> None:
        if text == "bad":
            raise OSError("the terminal is gone")
        lines.append(text)

    with PartOutput(tmp_path / "a.log", hear) as output:
        await write(output, "one\nbad\ntwo\n")
    assert lines == ["one", "two"]
    assert "a listener failed" in caplog.text
