"""A plugin of pytest for `mutants.py`: runs chosen tests in a given order, and logs each test's outcome and time.

- `MUTANTS_SELECT`: file of test ids; they alone run, in that order;
- `MUTANTS_LIMIT_S`: no test begins after so many seconds;
- `MUTANTS_LOG`: file to which each test's id, outcome and seconds are added.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import mutant_cover
import pytest


class Plugin:
    """The hooks."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._limit = time.monotonic() + float(os.environ.get("MUTANTS_LIMIT_S", "inf"))
        self._outcome = "passed"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests, in their order."""
        if "MUTANTS_SELECT" in os.environ:
            chosen = Path(os.environ["MUTANTS_SELECT"]).read_text().splitlines()
            places = {test: place for place, test in enumerate(chosen)}
            items[:] = sorted((each for each in items if each.nodeid in places), key=lambda each: places[each.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Attribute to a test what runs, and note its outcome."""
        self._outcome = "passed"
        if mutant_cover.COVER is not None:
            mutant_cover.COVER.switch(item.nodeid)
        start = time.monotonic()
        result = yield
        with Path(os.environ["MUTANTS_LOG"]).open("a") as log:
            log.write(json.dumps([item.nodeid, self._outcome, round(time.monotonic() - start, 3)]) + "\n")
        if time.monotonic() > self._limit:
            self._session.shouldstop = "the limit of time"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what failed, or was skipped."""
        if report.failed or (report.skipped and self._outcome == "passed"):
            self._outcome = report.outcome


def pytest_sessionstart(session: pytest.Session) -> None:
    """Register the hooks."""
    session.config.pluginmanager.register(Plugin(session), "mutants")
