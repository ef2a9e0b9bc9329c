"""What serve refuses before it starts anything."""

import asyncio
import json
import shutil
import ssl
from pathlib import Path
from types import SimpleNamespace

import pytest
from pagestream_cli.__main__ import build_parser, main
from pagestream_cli.serve import (
    Deployment,
    EngineLogs,
    GatewayPorts,
    ModelChoice,
    Plan,
    PortPlan,
    Reporter,
    check_parts,
    parse_options,
)
from support.clients.gateway_clients import issue_certificate


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def serve_status(model: Path, data: Path, *arguments: str) -> int:
    """Run serve in this process, which refuses to start; return its status."""
    return main(["serve", str(model), "--data-dir", str(data), "--http-port", "0", "--grpc-port", "0", *arguments])


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        (("--block-size", "17"), "", "block_size"),
        (("--max-num-seqs", "0"), "", "max_num_seqs"),
        ((), "PAGESTREAM_ENGINE__BLOCK_SIZE=none", "PAGESTREAM_ENGINE__BLOCK_SIZE"),
        ((), "PAGESTREAM_LIMITS__MAX_N=many", "PAGESTREAM_LIMITS__MAX_N"),
        ((), "PAGESTREAM_BROKER__LEASE=5", "PAGESTREAM_BROKER__LEASE"),
        (("--tls-key", "key.pem"), "", "go together"),
        (("--tls-certificate", "no.pem", "--tls-key", "no.key"), "", "no.pem: no such file"),
        (("--api-keys", "nothing"), "", "nothing: no such file"),
        (("--exit-after-greet",), "", "--greet"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    arguments: tuple[str, ...],
    variable: str,
    expected: str,
) -> None:
    if variable:
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value)
    data = tmp_path / "data"
    ports = ("--http-port", "0", "--grpc-port", "0")
    assert main(["serve", str(model), "--data-dir", str(data), *ports, *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not (data / "logs").exists() or not list((data / "logs").iterdir())


CONFIG = {
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("arguments", "config", "expected"),
    [
        (("--max-model-len", "4097"), {}, "max_model_len: given 4097, expected at most the model's context of 4096"),
        (("--max-model-len", "8193"), {"rope_scaling": YARN}, "at most the model's context of 8192"),
        (("--max-model-len", "4097"), {"rope_scaling": {**YARN, "rope_type": "linear"}}, "context of 4096"),
        (("--max-model-len", "9"), {"text_config": {"max_position_embeddings": 8}}, "at most the model's context of 8"),
        (("--tensor-parallel-size", "5"), {}, "given 5, expected a divisor of num_attention_heads, 12"),
        (("--tensor-parallel-size", "6"), {}, "a divisor or a multiple of num_key_value_heads, 4"),
        (("--tensor-parallel-size", "4"), {"intermediate_size": 90}, "a divisor of intermediate_size, 90"),
        (("--pipeline-parallel-size", "7"), {}, "at most the 6 layers of the model"),
        (("--scheduling-policy", "lottery"), {}, "scheduling_policy: given 'lottery', expected one of fcfs, priority"),
        (("--models", "other=./nowhere"), {}, "--models other=./nowhere: no such folder"),
    ],
)
def test_what_the_models_configuration_tells_is_refused_before_anything_starts(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    arguments: tuple[str, ...],
    config: dict[str, object],
    expected: str,
) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **config}))
    assert serve_status(model, tmp_path / "data", *arguments) == 2
    assert expected in capsys.readouterr().err
    assert not list((tmp_path / "data" / "logs").iterdir())


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (("--max-model-len", "8192"), {"rope_scaling": YARN}),
        (("--max-model-len", "8192"), {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        (("--max-model-len", "99999"), {"rope_scaling": {"rope_type": "of tomorrow"}}),
        (("--max-model-len", "99999"), {"max_position_embeddings": None}),
        (("--tensor-parallel-size", "4"), {"intermediate_size": 90, "num_local_experts": 8}),
        (("--tensor-parallel-size", "12"), {}),
        (("--scheduling-policy", "lottery", "--plugins", "of_mine"), {}),
    ],
)
def test_what_it_leaves_open_is_left_to_the_engine(
    model: Path, tmp_path: Path, *, arguments: tuple[str, ...], config: dict[str, object]
) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **config}))
    options = parse_options(build_parser().parse_args(["serve", str(model), "--data-dir", str(tmp_path), *arguments]))
    ports = PortPlan("redis://", None, (GatewayPorts(1, 2, None),), (None,))
    check_parts(Plan(options, ports, ModelChoice(str(model), "model")).engines(EngineLogs()))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/Model-7B-GGUF", "GGUF isn't read"), ("model.Q4_K_M.gguf", "GGUF isn't read"), (".", "x.gguf isn't read")],
)
def test_weights_that_are_not_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").write_text("GGUF")
    assert serve_status(Path(name), tmp_path / "data") == 2
    assert expected in capsys.readouterr().err


def test_a_shard_that_the_index_names_is_missed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    assert serve_status(model, tmp_path / "data") == 2
    assert "model-00002-of-00002.safetensors: no such file" in capsys.readouterr().err


def test_a_disk_that_is_full_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200 << 20))
    assert serve_status(model, tmp_path / "data") == 1
    said = capsys.readouterr().err
    assert "200 MB are free" in said
    assert "256 MB are needed" in said
    assert "--data-dir" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "keys holds no key"),
        ("# none yet\n", "keys holds no key"),
        ("abc -> team\n", "keys:1: expected the 64 hexadecimal"),
    ],
)
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_file_of_keys_is_read_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    text: str,
    expected: str,
    by_variable: bool,
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    if by_variable:
        monkeypatch.setenv("PAGESTREAM_GATEWAY__API_KEYS", str(file))
    flags = [] if by_variable else ["--api-keys", str(file)]
    assert main(["serve", "--data-dir", str(tmp_path / "data"), *flags]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    folders = [tmp_path_factory.mktemp("tls") for _ in range(2)]
    return [issue_certificate(folder, 1) for folder in folders]


@pytest.mark.parametrize(
    ("certificate", "key", "expected"),
    [
        ("garbage", "own", "--tls-certificate {certificate}: no certificate can be read"),
        ("own", "garbage", "--tls-key {key} cannot be used"),
        ("own", "other", "--tls-key {key} is not the key of the certificate"),
    ],
)
def test_a_certificate_and_its_key_are_loaded_before_anything_starts(
    tmp_path: Path,
    pairs: list[tuple[Path, Path]],
    capsys: pytest.CaptureFixture[str],
    *,
    certificate: str,
    key: str,
    expected: str,
) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("garbage")
    (own, own_key), (_, other_key) = pairs
    files = {
        "certificate": {"own": own, "garbage": garbage}[certificate],
        "key": {"own": own_key, "other": other_key, "garbage": garbage}[key],
    }
    flags = ["--tls-certificate", str(files["certificate"]), "--tls-key", str(files["key"])]
    assert main(["serve", "--data-dir", str(tmp_path / "data"), *flags]) == 2
    assert expected.format(**files) in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


async def test_tls_by_variables_is_probed_and_recorded_as_tls(
    tmp_path: Path, pairs: list[tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = pairs[0]
    monkeypatch.setenv("PAGESTREAM_GATEWAY__TLS_CERTIFICATE", str(certificate))
    monkeypatch.setenv("PAGESTREAM_GATEWAY__TLS_KEY", str(key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    options = parse_options(build_parser().parse_args(["serve", "--data-dir", str(tmp_path)]))
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        ports = PortPlan("redis://127.0.0.1:1", None, (GatewayPorts(port, port, None),), (None,))
        plan = Plan(options, ports, ModelChoice(str(tmp_path), "model"))
        (gateway,) = plan.gateways()
        assert gateway.probe is not None
        assert await gateway.probe()
    assert Deployment(plan, None, Reporter(started=0.0, verbose=False)).record.tls_certificate == str(certificate)
