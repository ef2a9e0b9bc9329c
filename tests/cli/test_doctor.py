import json
import os
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from pagestream_cli import DataDir, ProcessRecord, ServeRecord, write_record
from pagestream_cli.__main__ import main
from pagestream_cli.doctor import (
    Finding,
    Verdict,
    check_compiler,
    check_context,
    check_data_dir,
    check_logs,
    check_model,
    check_ports,
    check_python,
    check_redis,
    check_serve,
    check_torch,
    check_triton,
)
from pagestream_cli.serve import find_demo_model
from safetensors.numpy import save_file
from support.processes.stack import free_port

pytestmark = pytest.mark.served


def verdicts(findings: list[Finding]) -> list[Verdict]:
    return [finding.verdict for finding in findings]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros(8, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def test_this_machine_runs_the_tests_and_so_has_what_is_needed(tmp_path: Path) -> None:
    for check in (check_python, check_torch, check_triton, lambda: check_redis(DataDir(tmp_path))):
        assert Verdict.PROBLEM not in verdicts(list(check())), list(check())


def test_a_folder_of_another_redis_is_a_problem(tmp_path: Path) -> None:
    redis = DataDir(tmp_path).redis
    redis.mkdir()
    (redis / "server.json").write_text('{"name": "valkey", "version": "99.1.0", "format": "appendonlydir"}')
    (finding,) = check_redis(DataDir(tmp_path))
    assert finding.verdict is Verdict.PROBLEM
    assert "valkey 99.1.0" in finding.found
    assert "valkey 99.1.0" in finding.advice


def test_a_missing_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    (finding,) = check_compiler()
    assert finding.verdict is Verdict.WARNING
    assert "g++" in finding.advice


def test_what_writes_the_token_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("g++") is not None:
        (finding,) = check_logs()
        assert (finding.verdict, finding.found[:6]) == (Verdict.OK, "by C++")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (finding,) = check_logs()
    assert finding.verdict is Verdict.WARNING
    assert "by Python" in finding.found
    assert "no C++ compiler" in finding.found


def test_a_sound_model(model: Path) -> None:
    (finding,) = check_model(str(model))
    assert (finding.verdict, finding.found.endswith("MB of weights)")) == (Verdict.OK, True)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", b"{", "config.json cannot be read"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("model.safetensors", None, "no *.safetensors"),
        ("model.safetensors", b"cut off", "model.safetensors cannot be read"),
    ],
)
def test_a_broken_model_is_a_problem(model: Path, file: str, content: bytes | None, said: str) -> None:
    (model / file).unlink()
    if content is not None:
        (model / file).write_bytes(content)
    (finding,) = check_model(str(model))
    assert finding.verdict is Verdict.PROBLEM
    assert said in finding.found
    assert finding.advice


def test_no_such_model(tmp_path: Path) -> None:
    (finding,) = check_model(str(tmp_path / "none"))
    assert finding.verdict is Verdict.PROBLEM


def contexts(data: Path, model: str | None = None) -> list[Finding]:
    return list(check_context(model, DataDir.at(data)))


@pytest.mark.slow
def test_the_context_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process measures it that loads the model, by the variables that an engine would take; behind what a plugin
    prints.
    """
    (tmp_path / "talkative.py").write_text("print('[talkative] ready')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PAGESTREAM_ENGINE__PLUGINS", "talkative")
    monkeypatch.setenv("PAGESTREAM_ENGINE__NUM_GPU_BLOCKS_OVERRIDE", "40")
    (part,) = contexts(tmp_path)
    assert part.verdict is Verdict.WARNING
    assert part.found == "640 tokens of the model's 1,024; the KV pool holds 1 such sequences"
    monkeypatch.setenv("PAGESTREAM_ENGINE__MAX_MODEL_LEN", "641")
    (refused,) = contexts(tmp_path)
    assert refused.verdict is Verdict.PROBLEM
    assert refused.found.startswith("max_model_len: given 641, expected at most 640, what 40 KV blocks hold")


def test_a_large_model_that_no_engine_runs(model: Path, tmp_path: Path) -> None:
    """It says so without loading it."""
    num_bytes = 3 * 10**9
    header = json.dumps({"weight": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)  # a hole: no bytes on the disk
    (model / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    (refused,) = contexts(tmp_path, str(model))
    assert refused.verdict is Verdict.PROBLEM
    assert "recurrent state" in refused.found


def test_a_taken_port_is_a_problem_unless_it_is_our_own(tmp_path: Path) -> None:
    data_dir = DataDir.at(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (finding,) = check_ports(data_dir, "127.0.0.1", {"http": port})
        assert finding.verdict is Verdict.PROBLEM
        assert "--http-port" in finding.advice
        processes = (ProcessRecord("serve", os.getpid()), ProcessRecord("gateway-0", 5, {"http": port}))
        write_record(data_dir.serve_file, ServeRecord("demo", "redis://x", "127.0.0.1", processes, 0.0))
        (finding,) = check_ports(data_dir, "127.0.0.1", {"http": port})
        assert finding.verdict is Verdict.OK
        (running,) = check_serve(data_dir)
        assert "running: model 'demo'" in running.found


def test_a_serve_that_was_killed_is_seen(tmp_path: Path) -> None:
    data_dir = DataDir.at(tmp_path)
    assert verdicts(list(check_serve(data_dir))) == [Verdict.OK]
    record = ServeRecord("demo", "redis://x", "127.0.0.1", (ProcessRecord("serve", 2**22 + 1),), 0.0)
    write_record(data_dir.serve_file, record)
    assert verdicts(list(check_serve(data_dir))) == [Verdict.WARNING]
    data_dir.serve_file.write_text("{}")
    assert verdicts(list(check_serve(data_dir))) == [Verdict.WARNING]


def test_the_data_folder(tmp_path: Path) -> None:
    data_dir = DataDir.at(tmp_path / "not" / "there" / "yet")
    assert verdicts(list(check_data_dir(data_dir))) == [Verdict.OK, Verdict.OK]
    (tmp_path / "file").write_text("")
    assert verdicts(list(check_data_dir(DataDir.at(tmp_path / "file" / "x")))) == [Verdict.PROBLEM]


@pytest.mark.slow
def test_the_command_ends_with_1_when_there_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGESTREAM_ENGINE__MAX_NUM_SEQS", "8")
    ports = ["--http-port", str(free_port()), "--grpc-port", str(free_port())]
    assert main(["doctor", "--data-dir", str(tmp_path / "data"), *ports, "--json"]) == 0
    found = {finding["subject"]: finding["found"] for finding in json.loads(capsys.readouterr().out)}
    assert list(found)[:2] == ["python", "torch"]
    assert {"triton", "redis", "model", "context", "disk", "data folder", "c++ compiler"} <= set(found)
    for dtype in ("float32", "bfloat16"):
        assert re.search(
            r"(fast as|slower than) others for one sequence and [\d.]+(%| times)", found[f"deterministic {dtype}"]
        )
    assert found["context"] == "1,024 tokens, the model's own; the KV pool holds 8 such sequences"
    assert main(["doctor", str(tmp_path / "none"), "--data-dir", str(tmp_path / "data"), *ports]) == 1
    assert "problem  model" in capsys.readouterr().out


@pytest.mark.slow
def test_cards_that_are_not_here_get_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(find_demo_model()), "--gpu", "L4", "--gpu", "H100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (small,), (large,) = (found["gpus"][name]["sequences"].values() for name in ("L4", "H100"))
    assert 0 < small < large
    assert main(["doctor", "--model", str(find_demo_model()), "--gpu", "L4"]) == 0
    assert str(small) in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu", "said"), [("/nonexistent", "L4", "/nonexistent"), (None, "ZX81", "H100")])
def test_what_cannot_be_sized_is_said(
    capsys: pytest.CaptureFixture[str], model: str | None, gpu: str, said: str
) -> None:
    assert main(["doctor", *([] if model is None else [model]), "--gpu", gpu]) != 0
    assert said in capsys.readouterr().err


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "one", "--model", "other"]) != 0
    assert "MODEL or --model" in capsys.readouterr().err
