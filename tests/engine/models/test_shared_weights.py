"""Weights that engines map: equal tokens, one writer, and no harm from files that are cut off, damaged or too many."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.layers.linear import native_linears
from pagestream_engine.models.loader import Named, SharedWeights, map_or_write
from support.engines.tiny_models import make_model, random_prompts
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served
A_MODEL = [("a", torch.arange(5.0)), ("b", torch.arange(12, dtype=torch.int32).view(3, 4)), ("c", torch.ones(2, 3))]
FEW_BYTES, MANY_BYTES = 1 << 11, 1 << 20


def never() -> Iterator[Named]:
    raise AssertionError("a file that is there was written again")
    yield


def test_what_was_written_is_mapped(tmp_path: Path) -> None:
    first = map_or_write("key", lambda: iter(A_MODEL), MANY_BYTES, tmp_path / "new")
    second = map_or_write("key", never, MANY_BYTES, tmp_path / "new")
    for shared in (first, second):
        for name, expected in A_MODEL:
            tensor = shared.tensor(name)
            assert tensor is not None
            assert torch.equal(tensor, expected)
            assert tensor.data_ptr() % 64 == 0
        assert shared.tensor("d") is None
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["key.weights", "lock"]


@pytest.mark.parametrize("harm", ["cut off", "empty", "damaged"])
def test_a_file_that_is_not_whole_is_written_again(tmp_path: Path, harm: str) -> None:
    map_or_write("key", lambda: iter(A_MODEL), MANY_BYTES, tmp_path)
    path = tmp_path / "key.weights"
    data = path.read_bytes()
    at = data.index(b'"float32') if b'"float32' in data else data.index(b"torch.float32")
    path.write_bytes({"cut off": data[:-9], "empty": b"", "damaged": data[:at] + b"X" + data[at + 1 :]}[harm])
    with pytest.raises(OSError, match=r"key\.weights: "):
        SharedWeights(path)
    assert map_or_write("key", lambda: iter(A_MODEL), MANY_BYTES, tmp_path).tensor("b") is not None
    assert path.read_bytes() == data


def test_files_that_nobody_maps_make_room(tmp_path: Path) -> None:
    held = map_or_write("held", lambda: iter(A_MODEL), FEW_BYTES, tmp_path)
    tensor = held.tensor("a")
    size = held.num_bytes
    for name in ("old", "new"):
        map_or_write(name, lambda: iter(A_MODEL), FEW_BYTES, tmp_path)
    for age, name in enumerate(("new", "old", "held")):
        os.utime(tmp_path / f"{name}.weights", (time.time() - age, time.time() - age))
    map_or_write("more", lambda: iter(A_MODEL), 3 * size, tmp_path)
    assert {path.stem for path in tmp_path.glob("*.weights")} == {"held", "new", "more"}
    with pytest.raises(OSError, match=f"{size} bytes are in use by engines, expected at most 0"):
        map_or_write("most", lambda: iter(A_MODEL), size, tmp_path)
    del held
    assert tensor is not None
    assert torch.equal(tensor, A_MODEL[0][1])
    with pytest.raises(OSError, match="are in use"):
        map_or_write("most", lambda: iter(A_MODEL), size, tmp_path)
    del tensor
    map_or_write("most", lambda: iter(A_MODEL), size, tmp_path)
    assert {path.stem for path in tmp_path.glob("*.weights")} == {"most"}
    assert not list(tmp_path.glob("partial-*"))


@pytest.mark.slow
def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from pagestream_engine.models.loader import map_or_write\n"
        "def tensors():\n"
        "    yield 'a', torch.zeros(64)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "map_or_write('killed', tensors, 1 << 20, Path(sys.argv[1]))\n"
    )
    folder = tmp_path / "weights"
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == -9
    assert list(folder.glob("partial-*/*"))
    map_or_write("key", lambda: iter(A_MODEL), MANY_BYTES, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["key.weights", "lock"]


def test_a_folder_of_others_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(Exception, match="no write permission for others"):
        map_or_write("key", lambda: iter(A_MODEL), MANY_BYTES, tmp_path)


_RUN = """
import sys, time
from pathlib import Path
import torch
from pagestream_engine.models.loader import map_or_write
def make():
    print("made", flush=True)
    yield "a", torch.full((1 << 16,), 7.0)
    time.sleep(0.3)
    yield "b", torch.full((1 << 16,), 8.0)
shared = map_or_write("key", make, 1 << 30, Path(sys.argv[1]))
assert shared.tensor("a").sum() == 7 << 16 and shared.tensor("b").sum() == 8 << 16
print((Path(sys.argv[1]) / "key.weights").stat().st_ino)
"""


def test_of_processes_that_start_at_once_one_writes(tmp_path: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", _RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=LIMIT_S)[0].split() for process in started]
    assert sorted(map(len, printed)) == [1, 2]
    assert printed[0][-1] == printed[1][-1]


@pytest.mark.parametrize(
    "name", ["llama-tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "mixtral"))]
)
def test_an_engine_has_equal_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    if native_linears(torch.float32) is None:
        pytest.skip("no C++ kernels")
    folder = make_model(tmp_path / name, name)
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    found = tmp_path / "weights"
    monkeypatch.setattr("pagestream_engine.models.loader.weights_folder", lambda: found)

    def generate(shared_weights_gb: float) -> tuple[list[list[int]], int]:
        options = {"dtype": "float32", "device": "cpu", "attention_backend": "torch", "deterministic": True}
        llm = LLM(str(folder), shared_weights_gb=shared_weights_gb, num_gpu_blocks_override=64, **options)
        outputs = llm.generate(random_prompts([9, 30]), SamplingParams(temperature=0, max_tokens=8))
        size = llm.engine.memory_bytes()["model"]
        llm.engine.close()
        return [list(output.outputs[0].token_ids) for output in outputs], size

    private = generate(0)
    assert not found.exists()
    assert generate(1) == private
    (written,) = found.glob("*.weights")
    data = written.read_bytes()
    assert generate(1) == private
    assert [path.stem for path in found.glob("*.weights")] == [written.stem]
    assert written.read_bytes() == data

    written.unlink()
    with caplog.at_level(logging.WARNING):
        assert generate(1e-6) == private
    assert [record.message for record in caplog.records if "no other shares them" in record.message]
    os.utime(folder / "model.safetensors")
    assert generate(1) == private
    assert [path.stem for path in found.glob("*.weights")] != [written.stem]
