import json
import os
import threading
from pathlib import Path

import pytest
from pagestream_cli import ProcessRecord, ServeFileInvalidError, ServeRecord, dial_host, read_record, write_record
from pagestream_telemetry import loopback_host
from support.processes.waiting import LIMIT_S

RECORD = ServeRecord(
    model="demo",
    redis_url="redis://127.0.0.1:6390/0",
    host="0.0.0.0",  # noqa: S104 - only written down
    processes=(
        ProcessRecord("serve", 10),
        ProcessRecord("redis", 11, {"redis": 6390}, 0, "/logs/redis.log"),
        ProcessRecord("engine-0", None, {}, 2, "/logs/engine-0.log"),
        ProcessRecord("gateway-0", 13, {"http": 8000, "grpc": 50051}),
        ProcessRecord("gateway-1", 14, {"http": 8001, "grpc": 50052}),
    ),
    started=1000.5,
    ready=True,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    write_record(path, RECORD)
    assert read_record(path) == RECORD
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_the_names_that_other_programs_rely_on(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    write_record(path, RECORD)
    content = json.loads(path.read_text())
    assert content["redis_url"] == "redis://127.0.0.1:6390/0"
    assert content["processes"][3] == {
        "name": "gateway-0",
        "pid": 13,
        "ports": {"http": 8000, "grpc": 50051},
        "restarts": 0,
        "log": "",
        "is_spare": False,
    }


def test_addresses_of_the_gateways() -> None:
    assert RECORD.http_urls() == ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
    assert RECORD.grpc_targets() == ("127.0.0.1:50051", "127.0.0.1:50052")


@pytest.mark.parametrize(
    ("host", "dialled"),
    [
        ("0.0.0.0", "127.0.0.1"),  # noqa: S104
        ("::", "[::1]" if loopback_host() == "::1" else "127.0.0.1"),
        ("[::1]", "[::1]"),
        ("::1", "[::1]"),
        ("localhost", "localhost"),
        ("10.0.0.5", "10.0.0.5"),
        ("", "127.0.0.1"),
    ],
)
def test_how_a_listener_is_reached(host: str, dialled: str) -> None:
    assert dial_host(host) == dialled


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    write_record(path, RECORD)
    done = threading.Event()
    broken: list[Exception] = []

    def read() -> None:
        while not done.is_set():
            try:
                if read_record(path) != RECORD:
                    broken.append(ValueError("another record"))
            except ServeFileInvalidError as error:
                broken.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        write_record(path, RECORD)
    done.set()
    reader.join(LIMIT_S)
    assert broken == []


def test_no_file_is_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path / "serve.json") is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2}', '{"version": 1, "processes": [{"pid": 1}]}', '{"version": 1, "processes": 3}'],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.json"
    path.write_text(text)
    with pytest.raises(ServeFileInvalidError, match=r"serve\.json"):
        read_record(path)


def test_this_process_can_be_named() -> None:
    assert ProcessRecord("serve", os.getpid()).ports == {}
