"""What can't be loaded is refused with one message by `LLM`, `pagestream-engine` and `pagestream serve`."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import LLM, ConfigError, EngineError
from redis import Redis
from support.engines.architectures import small_config
from support.engines.tiny_models import VOCAB_SIZE, make_model
from support.processes.fork_server import ENGINES, run_forked, shared_server
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served

EXIT_BAD_OPTIONS = 2


@dataclass(frozen=True)
class Refusal:
    """How a whole model folder is spoilt, or the options, and the message."""

    message: str
    spoil: Callable[[Path], object] = lambda folder: None
    options: Mapping[str, Any] = field(default_factory=dict)
    """As `LLM` takes them."""

    @property
    def flags(self) -> list[str]:
        """The options as a process takes them."""
        flags: list[str] = []
        for name, value in self.options.items():
            flag = f"--{name.replace('_', '-')}"
            flags += [flag] if value is True else [flag, ",".join(value) if isinstance(value, list) else str(value)]
        return flags


def _change_config(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def _make_huge(folder: Path) -> None:
    """Write weights of 1.3 TiB that take no disk."""
    width = 1 << 30
    num_bytes = 4 * VOCAB_SIZE * width
    entry = {"dtype": "F32", "shape": [VOCAB_SIZE, width], "data_offsets": [0, num_bytes]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)


def _make_general(folder: Path) -> None:
    """Make it a model that `transformers`' code runs, without its weights, which are not asked for."""
    (folder / "config.json").unlink()
    small_config("gpt2").save_pretrained(folder)


def _make_mixture(folder: Path) -> None:
    (folder / "config.json").unlink()
    make_model(folder, "mixtral")


def _lose_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


REFUSALS = {
    "too large": Refusal(r"model: given 1324\.0 GiB of weights, expected at most .* GiB, .*; free memory", _make_huge),
    "cut off": Refusal(
        r"given bytes .*, expected the size of .* within the file; download the model again",
        lambda folder: os.truncate(folder / "model.safetensors", 100_000),
    ),
    "no safetensors": Refusal(
        r"model\.safetensors: given a header of .* bytes in a file of 900, expected a safetensors file; download",
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 900),
    ),
    "no weights": Refusal(r"no .*safetensors", lambda folder: [file.unlink() for file in folder.glob("*.safetensors")]),
    "missing shard": Refusal(
        r"model-00002-of-00002\.safetensors: no such file, expected weights as safetensors; convert or", _lose_shard
    ),
    "wrong shape": Refusal(
        r"embed_tokens\.weight: given shape \(331, 96\), expected \(331, 192\) by config\.json",
        _change_config(hidden_size=192),
    ),
    "unknown architecture": Refusal(
        r"config\.json: .*given .*nosuch.*, expected",
        _change_config(architectures=["NoSuchForCausalLM"], model_type="nosuch"),
    ),
    "malformed configuration": Refusal(
        r"config\.json: .*expected .*; download the model again",
        lambda folder: (folder / "config.json").write_text("{"),
    ),
    "too many blocks": Refusal(
        r"num_gpu_blocks_override: given 10{12}, expected at most \d+, .*; lower it",
        options={"num_gpu_blocks_override": 10**12},
    ),
    "context beyond the pool": Refusal(
        r"max_model_len: given 500, expected at most 64, what 4 KV blocks hold; lower it, or give the pool more",
        options={"num_gpu_blocks_override": 4, "max_model_len": 500},
    ),
    "impossible option": Refusal(r"block_size: given 3, expected one of 1, 2, 4", options={"block_size": 3}),
    "context beyond the model": Refusal(
        r"max_model_len: given 600, expected at most the model's context of 512", options={"max_model_len": 600}
    ),
    "indivisible ranks": Refusal(
        r"tensor_parallel_size: given 5, expected a divisor of num_attention_heads, ",
        options={"tensor_parallel_size": 5},
    ),
    "deterministic experts": Refusal(
        r"deterministic: given True, expected False or None for MixtralForCausalLM with the Triton kernels; its router",
        _make_mixture,
        options={"deterministic": True, "attention_backend": "triton"},
    ),
    "deterministic modelling code": Refusal(
        r"deterministic: given True, expected False or None for GPT2LMHeadModel; functions that it computes beside",
        _make_general,
        options={"deterministic": True, "device": "cpu", "dtype": "float32"},
    ),
    "missing plugin": Refusal(
        r"plugins: given 'nowhere\.policies', expected a module on Python's path; install its package, or",
        options={"plugins": ["nowhere.policies"]},
    ),
    "unknown policy": Refusal(
        r"scheduling_policy: given 'lottery', expected one of fcfs, .*fair.*; a module that plugins names adds others",
        options={"scheduling_policy": "lottery"},
    ),
}
_BEFORE, _AS_IT_LOADS = "missing plugin", "cut off"


def _slow_but(*quick: str) -> list[Any]:
    """Return the refusals, of which those that are not `quick` are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in REFUSALS]


@pytest.fixture(scope="module")
def whole_folder(llama: Path) -> Path:
    return llama


@pytest.fixture
def spoil(whole_folder: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        folder = shutil.copytree(whole_folder, tmp_path / "model")
        REFUSALS[name].spoil(folder)
        return folder

    return make


@pytest.mark.parametrize("name", REFUSALS)
def test_offline(spoil: Callable[[str], Path], name: str) -> None:
    refusal = REFUSALS[name]
    with pytest.raises(EngineError) as caught:
        LLM(spoil(name), **refusal.options)
    assert re.search(refusal.message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "value"), [("block_size", 7), ("max_num_seqs", 0), ("dtype", "foo")])
def test_impossible_options(whole_folder: Path, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: given {value!r}, expected "):
        LLM(whole_folder, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", _slow_but(_BEFORE, _AS_IT_LOADS))
def test_an_engine_process_publishes_nothing(
    spoil: Callable[[str], Path], name: str, redis_url: str, tmp_path: Path
) -> None:
    """And opens no port: an attempt to would end it with another message, as the test holds that port."""
    served = f"refused-{name.replace(' ', '-')}"
    with socket.create_server(("", 0)) as held:
        options = ["--redis", redis_url, "--metrics-port", str(held.getsockname()[1]), "--served-model-name", served]
        command = ("pagestream_worker.__main__", str(spoil(name)), *options, *REFUSALS[name].flags)
        status, said = run_forked(shared_server(*ENGINES), tmp_path, *command)
    assert status == EXIT_BAD_OPTIONS, said
    [message] = [line for line in said.splitlines() if line.startswith("pagestream-engine: ")]
    assert re.search(REFUSALS[name].message, message), message
    assert "Traceback" not in said
    with Redis.from_url(redis_url) as redis:
        assert not [key for key in redis.scan_iter("*") if served.encode() in key]


@pytest.mark.parametrize("name", _slow_but(_AS_IT_LOADS))
def test_serve_ends_with_one_line_and_opens_no_port(spoil: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0", "--data-dir", str(tmp_path / "data")]
    command = [sys.executable, "-m", "pagestream_cli", "serve", str(spoil(name)), *ports, *REFUSALS[name].flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == EXIT_BAD_OPTIONS
    [message] = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert "Traceback" not in ended.stderr
    assert "engine-0 ready" not in ended.stdout + ended.stderr
    if name not in ("malformed configuration", "impossible option"):  # refused by serve itself, in its words
        assert re.search(REFUSALS[name].message, message), message
    log = tmp_path / "data" / "logs" / "gateway-0.log"
    assert not log.exists() or '"serving"' not in log.read_text(), "the gateway has bound its ports"


@pytest.mark.slow
def test_only_serving_needs_a_tokenizer(whole_folder: Path, tmp_path: Path, redis_url: str) -> None:
    folder = shutil.copytree(whole_folder, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    [output] = LLM(folder).generate([[5, 6, 7]], use_tqdm=False)
    assert output.outputs[0].token_ids
    for module, options in (("pagestream_worker", ["--redis", redis_url]), ("pagestream_cli", [])):
        verb = ["serve"] if module == "pagestream_cli" else []
        command = [sys.executable, "-m", module, *verb, str(folder), *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert ended.returncode != 0
        assert "tokenizer.json" in ended.stderr
        assert "Traceback" not in ended.stderr
