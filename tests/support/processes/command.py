"""The command in this process, which has imported its modules: no start, and no import, is waited for."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest
from pagestream_cli.__main__ import main


@dataclass(frozen=True)
class Done:
    """A command's status and output."""

    returncode: object
    stdout: str
    stderr: str


def run(*arguments: str, stdin: str | None = None) -> Done:
    """Run a command to its end."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        try:
            status: object = main(arguments)
        except SystemExit as ended:
            status = ended.code
    return Done(status, out.getvalue(), err.getvalue())
