"""What serve refuses before it starts anything."""

import asyncio
import ssl
from pathlib import Path

import pytest
from pagestream_cli.__main__ import build_parser, main
from pagestream_cli.serve import Deployment, GatewayPorts, ModelChoice, Plan, PortPlan, Reporter, parse_options
from support.clients.gateway_clients import issue_certificate


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


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
