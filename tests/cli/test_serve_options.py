import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from pagestream_cli import DataDir, PortTakenError, ProcessRecord, ServeRecord, UsageError, write_record
from pagestream_cli.__main__ import build_parser, main
from pagestream_cli.serve import (
    MAX_CHARS,
    PASSED_ON,
    DrainStage,
    EngineLogs,
    ModelChoice,
    Plan,
    ServeOptions,
    assign_ports,
    choose_model,
    demo_model_places,
    engine_environment,
    engine_name,
    engines_left_behind,
    find_demo_model,
    parse_options,
    shorten,
)
from pagestream_cli.supervisor import Death, RestartRecord
from pagestream_telemetry import loopback_host


def options(*typed: str) -> ServeOptions:
    return parse_options(build_parser().parse_args(["serve", *typed]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def test_the_defaults_are_the_documented_ones() -> None:
    found = options()
    assert (found.host, found.http_port, found.grpc_port, found.engines, found.gateways) == (
        "127.0.0.1",
        8000,
        50051,
        1,
        1,
    )
    assert (found.model, found.redis_url, found.engine_arguments, found.api_keys) == (None, None, (), None)


def test_engine_options_are_handed_on_as_typed() -> None:
    typed = ["--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8"]
    assert options("model", *typed, "--no-enable-prefix-caching").engine_arguments == (
        *("--dtype", "float32", "--max-model-len", "256"),
        *("--num-gpu-blocks-override", "64", "--max-num-seqs", "8"),
        "--no-enable-prefix-caching",
    )


@pytest.mark.parametrize("flag", ["--deterministic", "--no-deterministic"])
def test_the_engine_reads_the_deterministic_flag_that_is_handed_on(flag: str) -> None:
    from pagestream_worker import build_parser as engine_parser
    from pagestream_worker import engine_config

    arguments = options("model", flag).engine_arguments
    assert arguments == (flag,)
    parsed = engine_parser().parse_args(["model", "--redis", "redis://127.0.0.1", *arguments])
    assert engine_config(parsed).model.deterministic is (flag == "--deterministic")
    unsaid = engine_parser().parse_args(["model", "--redis", "redis://127.0.0.1"])
    assert engine_config(unsaid).model.deterministic is None


def test_the_engine_knows_every_option_that_is_handed_to_it() -> None:
    from pagestream_worker import build_parser as engine_parser

    known = set(engine_parser()._option_string_actions)
    assert set(PASSED_ON) <= known
    assert {"--redis", "--served-model-name", "--engine-id", "--enable-prefix-caching"} <= known


@pytest.mark.parametrize("typed", [["--engines", "0"], ["--gateways", "-1"], ["--engines", "two"]])
def test_counts_start_at_one(typed: list[str]) -> None:
    with pytest.raises(SystemExit):
        options(*typed)


def test_the_demo_model_is_found_in_the_checkout() -> None:
    assert find_demo_model() in demo_model_places()
    choice = choose_model(None, None)
    assert choice.name == "demo"
    assert (Path(choice.source) / "config.json").is_file()


def test_the_name_of_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_model(str(folder), None) == ModelChoice(str(folder), "tiny-llama")
    assert choose_model(str(folder), "mine").name == "mine"
    monkeypatch.chdir(folder.parent)
    assert choose_model("tiny-llama", None).source == str(folder)
    assert choose_model("some-org/Some-Model-1B", None) == ModelChoice(
        "some-org/Some-Model-1B", "some-org/Some-Model-1B"
    )
    assert choose_model("some-org/Some-Model-1B@v2", None).name == "some-org/Some-Model-1B"


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "nothing"])
def test_a_folder_that_is_not_there_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        choose_model(model, None)


def first_of_three_free() -> int:
    """Below the range from which connections get theirs, so that none takes one of them meanwhile."""
    for base in range(20_000 + os.getpid() % 1000 * 10, 32_000, 3):
        with ExitStack() as stack, suppress(OSError):
            for more in range(3):
                stack.enter_context(socket.create_server(("127.0.0.1", base + more)))
            return base
    raise AssertionError("no three ports are free")


def test_several_gateways_take_the_ports_after_the_first(tmp_path: Path) -> None:
    base = first_of_three_free()
    assigned = assign_ports(options("--http-port", str(base), "--grpc-port", "0", "--gateways", "3"))
    assert [ports.http for ports in assigned.gateways] == [base, base + 1, base + 2]
    assert len({ports.grpc for ports in assigned.gateways}) == 3
    assert assigned.redis_url == f"unix://{assigned.redis_socket}?db=0"


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"port {port} \(--http-port\)"):
            assign_ports(options("--http-port", str(port), "--grpc-port", "0"))


@pytest.mark.parametrize("host", ["::", "", "[::1]", "localhost"])
def test_a_port_that_is_taken_at_one_address_of_the_host_is_refused(host: str) -> None:
    taken = "127.0.0.1" if host == "localhost" or loopback_host() != "::1" else "::1"
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    if host == "[::1]" and taken != "::1":
        pytest.skip("this machine has no IPv6 loopback address")
    with socket.create_server((taken, 0), family=family) as server:
        asked = ("--http-port", str(server.getsockname()[1]), "--grpc-port", "0")
        with pytest.raises(PortTakenError):
            assign_ports(options("--host", host, *asked))
        if taken == "::1":
            assert assign_ports(options("--host", "127.0.0.1", *asked))


def test_metrics_ports_go_to_gateways_then_engines() -> None:
    assigned = assign_ports(options("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--engines", "2"))
    assert len({assigned.gateways[0].metrics, *assigned.engine_metrics} - {None}) == 3


def test_metrics_ports_ask_for_no_key_and_listen_on_this_machine_alone(folder: Path) -> None:
    asked = ("--host", "0.0.0.0", "--metrics-port", "0")  # noqa: S104 - nothing is bound
    for typed, expected in (((), "127.0.0.1"), (("--metrics-host", "127.0.0.2"), "127.0.0.2")):
        plan = plan_of(folder, *asked, *typed)
        for part in (*plan.engines(EngineLogs()), *plan.gateways()):
            assert part.argv[part.argv.index("--metrics-host") + 1] == expected


def plan_of(folder: Path, *typed: str) -> Plan:
    found = options(str(folder), "--data-dir", str(folder.parent), "--http-port", "0", "--grpc-port", "0", *typed)
    return Plan(found, assign_ports(found), choose_model(found.model, found.served_model_name))


def test_the_command_lines_of_the_parts(folder: Path) -> None:
    plan = plan_of(folder, "--engines", "2", "--gateways", "2", "--dtype", "float32", "--api-keys", "keys.txt")
    url = plan.ports.redis_url
    engines, gateways = plan.engines(EngineLogs()), plan.gateways()
    assert [part.name for part in engines + gateways] == ["engine-0", "engine-1", "gateway-0", "gateway-1"]
    engine, gateway = engines[1].argv, gateways[1].argv
    assert engine[1:4] == ("-m", "pagestream_worker", str(folder))
    assert engine[6:8] == ("--served-model-name", "tiny-llama")
    assert engine[4:6] == ("--redis", url)
    assert engine[-2:] == ("--dtype", "float32")
    assert gateway[1:5] == ("-m", "pagestream_gateway", "--redis", url)
    assert gateway[gateway.index("--http-port") + 1] == str(plan.ports.gateways[1].http)
    assert gateway[gateway.index("--api-keys") + 1] == str(Path("keys.txt").absolute())
    assert len({part.argv[part.argv.index("--engine-id") + 1] for part in engines}) == 2
    assert {part.env["PAGESTREAM_GATEWAY__DEFAULT_MODEL"] for part in gateways} == {"tiny-llama"}


def test_engines_log_that_they_are_ready_whatever_is_logged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "PAGESTREAM_TELEMETRY__LOG_LEVEL"
    for level, expected in (("WARNING", "INFO"), ("ERROR", "INFO"), ("DEBUG", None)):
        monkeypatch.setenv(variable, level)
        plan = plan_of(folder)
        assert plan.engines(EngineLogs())[0].env.get(variable) == expected
        assert variable not in plan.gateways()[0].env


def test_gateways_end_first_and_redis_last(folder: Path) -> None:
    plan = plan_of(folder)
    stages = [plan.gateways()[0].drain_stage, plan.engines(EngineLogs())[0].drain_stage, plan.redis(["x"]).drain_stage]
    assert stages == [DrainStage.GATEWAY, DrainStage.ENGINE, DrainStage.REDIS]
    assert stages == sorted(stages)


def test_redis_is_never_waited_for_after_it_has_run(folder: Path) -> None:
    """Ten kills in a row: the streams go on within two seconds of each."""
    policy = plan_of(folder).redis(["redis-server"]).policy
    assert policy is not None
    record = RestartRecord(policy)
    record.add(Death(lived_s=10.0, was_ready=True, exit_code=-9))
    delays = [record.add(Death(lived_s=0.5, was_ready=True, exit_code=-9)) for _ in range(10)]
    assert max(delays) < 2.0


def test_engines_of_a_killed_serve_are_known_by_its_file(tmp_path: Path) -> None:
    data_dir = DataDir.at(tmp_path)
    assert engines_left_behind(data_dir) == ()
    names = ("serve", "redis", "engine-0", "engine-1", "gateway-0")
    processes = tuple(ProcessRecord(name, 70 + i) for i, name in enumerate(names))
    write_record(data_dir.serve_file, ServeRecord("demo", "redis://x", "127.0.0.1", processes, 0.0))
    assert engines_left_behind(data_dir) == (engine_name("engine-0", 70), engine_name("engine-1", 70))
    data_dir.serve_file.write_text("{")
    assert engines_left_behind(data_dir) == ()


def test_several_engines_share_the_cores() -> None:
    cores = os.cpu_count() or 1
    assert engine_environment(1, {}, None) == engine_environment(1, {}, 1 << 30) == {}
    assert engine_environment(1, {}, 1 << 20) == {"OMP_NUM_THREADS": "1"}
    shared = {"PAGESTREAM_ENGINE__SHARED_WEIGHTS_GB": "32"}
    assert engine_environment(2, {}, None) == {"OMP_NUM_THREADS": str(max(cores // 2, 1)), **shared}
    assert engine_environment(2, {"OMP_NUM_THREADS": "7"}, 1 << 20) == {}
    assert engine_environment(2, {"OMP_NUM_THREADS": "7"}, 1 << 30) == shared
    assert engine_environment(2, dict.fromkeys(("OMP_NUM_THREADS", *shared), "0"), 1 << 30) == {}


def test_an_engine_that_claims_says_so_in_its_log() -> None:
    logs = EngineLogs()
    logs.read("engine-0", '{"level": "INFO", "message": "getting ready"}')
    logs.read("engine-0", "ready")
    logs.read("engine-0", '{"message": "ready"')
    assert not logs.claims("engine-0")
    logs.read("engine-0", '{"level": "INFO", "message": "ready", "engine_id": "engine-0-1:ab"}')
    assert logs.claims("engine-0")
    assert logs.forget("engine-0") == "engine-0-1:ab"
    assert logs.forget("engine-0") is None
    assert not logs.claims("engine-0")


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ('{"level": "INFO", "message": "claimed"}', 20, "claimed"),
        ('{"level": "warning", "message": "put off"}', 30, "put off"),
        (
            '{"level": "ERROR", "message": "failed", "exc_info": "Traceback\\n  x\\nValueError: y"}',
            40,
            "failed: ValueError: y",
        ),
        ("Traceback (most recent call last):", 30, "Traceback (most recent call last):"),
        ("12:M 21 Nov 2026 03:45:14.877 # Server initialized", 20, "Server initialized"),
        ("12:M 21 Nov 2026 03:45:14.877 # WARNING Memory overcommit", 20, "WARNING Memory overcommit"),
        ("12:M 21 Nov 2026 03:45:14.877 # Write error: no space", 30, "Write error: no space"),
        ("12:M 21 Nov 2026 03:45:14.877 * Ready", 20, "Ready"),
        ("{broken", 20, "{broken"),
        ('["a"]', 20, '["a"]'),
    ],
)
def test_lines_in_their_short_form(line: str, level: int, text: str) -> None:
    short = shorten(line)
    assert (short.level, short.text) == (level, text)


def test_long_lines_are_cut() -> None:
    assert len(shorten("x" * 10_000).text) == MAX_CHARS


def test_exit_after_greet_needs_a_greeting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--exit-after-greet"]) == 2
    assert "--greet" in capsys.readouterr().err


def test_a_missing_key_file_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-keys", str(tmp_path / "none"), "--data-dir", str(tmp_path / "data")]) == 2
    assert "--api-keys" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
