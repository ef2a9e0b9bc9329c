import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_gateway.configuration import load_settings
from pagestream_gateway.core.identities import audit as module
from pagestream_gateway.core.identities.audit import Audit
from pagestream_gateway.core.identities.identity import Identity
from pagestream_gateway.errors import SettingsError
from pagestream_gateway.settings import AuditSettings

CALLER = Identity("a", "key", peer="10.0.0.1")
SPEC = RequestSpec(request_id="r", model="m", tenant="a", prompts=[{"ids": [1, 2]}, {"ids": [3]}])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def audit(file: Path) -> Iterator[Audit]:
    with closing(Audit(AuditSettings(file=file, max_failures_per_minute=3))) as audit:
        yield audit


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lines_say_who_did_what(audit: Audit, file: Path) -> None:
    audit.accepted(CALLER, SPEC)
    audit.ended(CALLER, "completions", SPEC, "ok", 7)
    accepted, ended = lines(file)
    who = {"tenant": "a", "key": "key", "peer": "10.0.0.1", "request_id": "r", "model": "m", "prompt_tokens": 3}
    assert accepted.items() >= {"event": "accept", "logger": "pagestream.audit", **who}.items()
    assert ended.items() >= {"event": "end", "api": "completions", "outcome": "ok", "output_tokens": 7, **who}.items()
    assert not logging.getLogger("pagestream.audit").propagate


def test_what_anybody_can_cause_is_bounded_by_time(audit: Audit, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(1000):
        audit.failed("10.0.0.2", "the API key is not known")
    assert [each["event"] for each in lines(file)] == ["auth_failure"] * 3
    monkeypatch.setattr(module, "_WINDOW_S", 0.0)
    audit.failed("10.0.0.2", "the API key is not known")
    assert [(each["event"], each.get("number")) for each in lines(file)[3:]] == [
        ("suppressed", 997),
        ("auth_failure", None),
    ]


def test_files_are_bounded(file: Path) -> None:
    with closing(Audit(AuditSettings(file=file, max_file_bytes=2000, max_files=3))) as audit:
        for _ in range(100):
            audit.accepted(CALLER, SPEC)
    sizes = [each.stat().st_size for each in file.parent.iterdir()]
    assert len(sizes) == 3
    assert max(sizes) <= 2000


def test_without_a_file_it_is_with_the_other_logs_whatever_their_level(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    with closing(Audit(AuditSettings())) as audit:
        audit.refused(CALLER, "completions", "queue_full")
    assert [vars(each)["code"] for each in caplog.records] == ["queue_full"]
    with closing(Audit(AuditSettings(file=file), is_on=False)) as silent:
        silent.accepted(CALLER, SPEC)
    assert not file.exists()


def test_a_file_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"audit\.file: cannot write"):
        Audit(AuditSettings(file=tmp_path / "no" / "folder"))


def test_it_is_on_where_callers_have_names() -> None:
    for flags, environ, expected in (
        ([], {}, False),
        (["--api-keys", "keys"], {}, True),
        (["--admin-keys", "keys"], {}, True),
        (["--jwt-issuers", "issuers"], {"PAGESTREAM_AUDIT__ENABLED": "false"}, False),
        ([], {"PAGESTREAM_AUDIT__ENABLED": "true"}, True),
    ):
        assert load_settings(flags, environ).audits is expected
