import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from pagestream_cli.__main__ import main
from pagestream_cli.datadir import DataDir
from pagestream_cli.doctor import context, determinism, place, sizing, software
from pagestream_cli.doctor.command import as_json, as_text
from pagestream_cli.doctor.finding import Finding, Verdict, ok, problem, warning
from pagestream_cli.ports import free_port
from pagestream_cli.serve.model import find_demo_model
from pagestream_cli.servefile import ProcessRecord, ServeRecord, write_record
from pagestream_engine.layers import linear_times
from pagestream_engine.layers.native.library import native_linears
from pagestream_engine.native_build import find_compiler
from pagestream_engine.runner import numerics
from safetensors.numpy import save_file


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


def test_this_machine_runs_the_tests_and_so_has_what_is_needed() -> None:
    for check in (software.check_python, software.check_torch, software.check_triton, software.check_redis):
        assert Verdict.PROBLEM not in verdicts(list(check())), list(check())


def test_triton_is_held_against_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.pinned_triton() == "3.7.1"
    monkeypatch.setattr(software, "pinned_triton", lambda: "0.0.1")
    (finding,) = software.check_triton()
    assert finding.verdict is Verdict.PROBLEM
    assert "pip install triton==0.0.1" in finding.advice


def test_an_old_interpreter_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "OLDEST_PYTHON", (99, 0))
    (finding,) = software.check_python()
    assert finding.verdict is Verdict.PROBLEM


def test_a_missing_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    (finding,) = software.check_compiler()
    assert finding.verdict is Verdict.WARNING
    assert "g++" in finding.advice


def test_what_writes_the_token_logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if find_compiler() is not None:
        (finding,) = software.check_logs()
        assert (finding.verdict, finding.found[:6]) == (Verdict.OK, "by C++")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (finding,) = software.check_logs()
    assert finding.verdict is Verdict.WARNING
    assert "by Python" in finding.found
    assert "no C++ compiler" in finding.found


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("amx", [True, False])
def test_whether_the_deterministic_mode_is_on_and_what_it_costs(monkeypatch: pytest.MonkeyPatch, amx: bool) -> None:
    monkeypatch.setattr(determinism, "_SHAPE", (64, 64))
    monkeypatch.setattr(determinism, "_SECONDS", 0.0)
    monkeypatch.setattr(linear_times, "_COLD_BYTES", 0)
    monkeypatch.setattr(numerics, "computes_bfloat16_on_amx", lambda *_: amx)
    kernels = native_linears(torch.float32)
    is_fast = kernels is not None and kernels.level.is_fast
    monkeypatch.setattr(torch.cuda, "is_available", lambda: amx)
    found = {finding.subject: finding.found for finding in determinism.check_determinism()}
    assert ("off by default" in found.get("deterministic on a GPU", "")) is amx
    for name, is_on in (("float32", is_fast), ("bfloat16", is_fast and not amx)):
        text = found[f"deterministic {name}"]
        assert ("on by default" in text) is is_on
        assert ("--deterministic turns it on" in text) is not is_on
        assert re.search(r"cost [+-]\d+% for one sequence and [+-]\d+% for 64 sequences", text)


def test_a_machine_without_redis_hears_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = software.check_redis()
    assert found.verdict is Verdict.OK
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("pagestream_streams.connection.embedded.find_spec", lambda name: None)
    (missing,) = software.check_redis()
    assert missing.verdict is Verdict.PROBLEM
    assert "redis-server" in missing.advice


def test_a_sound_model(model: Path) -> None:
    (finding,) = place.check_model(str(model))
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
    (finding,) = place.check_model(str(model))
    assert finding.verdict is Verdict.PROBLEM
    assert said in finding.found
    assert finding.advice


def test_no_such_model(tmp_path: Path) -> None:
    (finding,) = place.check_model(str(tmp_path / "none"))
    assert finding.verdict is Verdict.PROBLEM


def contexts(data: Path, model: str | None = None) -> list[Finding]:
    return list(context.check_context(model, DataDir.at(data)))


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


def test_the_context_is_measured_only_where_that_is_cheap(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "LIMIT_S", 0.001)
    assert [finding.found for finding in contexts(tmp_path)] == ["not measured within 0 s"]
    monkeypatch.setattr(context, "LARGEST_LOADED_BYTES", 1)
    (large,) = contexts(tmp_path)
    assert large.found.startswith("not measured, as that loads 0.0 GB; to do so: ")
    assert str(find_demo_model()) in large.found
    serve = ServeRecord("demo", "redis://x", "127.0.0.1", (ProcessRecord("serve", os.getpid()),), started=0.0)
    write_record(DataDir.at(tmp_path).serve_file, serve)
    (busy,) = contexts(tmp_path)
    assert busy.found.startswith("not measured while serve runs")
    (model / "tokenizer.json").unlink()
    assert contexts(tmp_path, str(model)) == [], "the model's own finding says what is wrong"


def test_a_taken_port_is_a_problem_unless_it_is_our_own(tmp_path: Path) -> None:
    data_dir = DataDir.at(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (finding,) = place.check_ports(data_dir, "127.0.0.1", {"http": port})
        assert finding.verdict is Verdict.PROBLEM
        assert "--http-port" in finding.advice
        processes = (ProcessRecord("serve", os.getpid()), ProcessRecord("gateway-0", 5, {"http": port}))
        write_record(data_dir.serve_file, ServeRecord("demo", "redis://x", "127.0.0.1", processes, 0.0))
        (finding,) = place.check_ports(data_dir, "127.0.0.1", {"http": port})
        assert finding.verdict is Verdict.OK
        (running,) = place.check_serve(data_dir)
        assert "running: model 'demo'" in running.found


def test_a_serve_that_was_killed_is_seen(tmp_path: Path) -> None:
    data_dir = DataDir.at(tmp_path)
    assert verdicts(list(place.check_serve(data_dir))) == [Verdict.OK]
    record = ServeRecord("demo", "redis://x", "127.0.0.1", (ProcessRecord("serve", 2**22 + 1),), 0.0)
    write_record(data_dir.serve_file, record)
    assert verdicts(list(place.check_serve(data_dir))) == [Verdict.WARNING]
    data_dir.serve_file.write_text("{}")
    assert verdicts(list(place.check_serve(data_dir))) == [Verdict.WARNING]


def test_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = DataDir.at(tmp_path / "not" / "there" / "yet")
    assert verdicts(list(place.check_data_dir(data_dir))) == [Verdict.OK, Verdict.OK]
    (tmp_path / "file").write_text("")
    assert verdicts(list(place.check_data_dir(DataDir.at(tmp_path / "file" / "x")))) == [Verdict.PROBLEM]
    monkeypatch.setattr(place, "LITTLE_DISK_BYTES", 1 << 80)
    assert verdicts(list(place.check_data_dir(data_dir))) == [Verdict.OK, Verdict.WARNING]


def test_the_report_has_a_line_for_each_finding_and_what_to_do() -> None:
    findings = [
        ok("python", "3.11"),
        warning("compiler", "none", "install one"),
        problem("port 1", "in use", "free it"),
    ]
    assert as_text(findings, coloured=False).splitlines() == [
        "ok       python    3.11",
        "warning  compiler  none",
        "                   -> install one",
        "problem  port 1    in use",
        "                   -> free it",
    ]
    assert "\x1b[31m" in as_text(findings, coloured=True)
    assert json.loads(as_json(findings))[2] == {
        "subject": "port 1",
        "verdict": "problem",
        "found": "in use",
        "advice": "free it",
    }


def test_the_command_ends_with_1_when_there_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGESTREAM_ENGINE__MAX_NUM_SEQS", "8")
    ports = ["--http-port", str(free_port()), "--grpc-port", str(free_port())]
    assert main(["doctor", "--data-dir", str(tmp_path / "data"), *ports, "--json"]) == 0
    found = {finding["subject"]: finding["found"] for finding in json.loads(capsys.readouterr().out)}
    assert list(found)[:2] == ["python", "torch"]
    assert {"triton", "redis", "model", "context", "disk", "data folder", "c++ compiler"} <= set(found)
    assert found["context"] == "1,024 tokens, the model's own; the KV pool holds 8 such sequences"
    assert main(["doctor", str(tmp_path / "none"), "--data-dir", str(tmp_path / "data"), *ports]) == 1
    assert "problem  model" in capsys.readouterr().out


def test_cards_that_are_not_here_get_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(find_demo_model()), "--gpu", "L4", "--gpu", "H100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (small,), (large,) = (found["gpus"][name]["sequences"].values() for name in ("L4", "H100"))
    assert 0 < small < large
    assert [str(small) in line for line in sizing.as_text(found).splitlines()[-2:]] == [True, False]


@pytest.mark.parametrize(("model", "gpu", "said"), [("/nonexistent", "L4", "/nonexistent"), (None, "ZX81", "H100")])
def test_what_cannot_be_sized_is_said(
    capsys: pytest.CaptureFixture[str], model: str | None, gpu: str, said: str
) -> None:
    assert main(["doctor", *([] if model is None else [model]), "--gpu", gpu]) != 0
    assert said in capsys.readouterr().err


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "one", "--model", "other"]) != 0
    assert "MODEL or --model" in capsys.readouterr().err
