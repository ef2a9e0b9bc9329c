"""What serve refuses before it starts anything."""

from pathlib import Path

import pytest
from pagestream_cli.__main__ import main


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
