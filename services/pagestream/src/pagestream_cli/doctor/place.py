"""Checks of what serve uses on this machine: ports, model, the length of a sequence, disk, data folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pagestream_cli.datadir import DataDir, ServeRecord, read_record
from pagestream_cli.doctor.finding import Finding, ok, problem, warning
from pagestream_cli.errors import ServeFileInvalidError, UsageError
from pagestream_cli.ports import is_free
from pagestream_cli.serve.model import find_demo_model, model_problem
from pagestream_cli.supervisor.guard import is_alive

GIB = 1 << 30
LITTLE_DISK_BYTES = 2 * GIB
"""Free space for the queue's file, its rewrite and the logs."""


def check_data_dir(data_dir: DataDir) -> Iterator[Finding]:
    """Check that the data folder can be written and has free space."""
    existing = next(folder for folder in (data_dir.path, *data_dir.path.parents) if folder.exists())
    if not _can_write(existing):
        yield problem("data folder", f"{data_dir.path} cannot be written", "choose another with --data-dir DIR")
        return
    yield ok("data folder", str(data_dir.path))
    free = shutil.disk_usage(existing).free
    text = f"{free / GIB:.1f} GiB free at {existing}"
    if free < LITTLE_DISK_BYTES:
        yield warning(
            "disk",
            text,
            "make room, or put the data folder elsewhere with --data-dir DIR: a full disk stops Redis",
        )
    else:
        yield ok("disk", text)


def _can_write(folder: Path) -> bool:
    """Write to the folder: access bits permit root what a read-only filesystem refuses."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def check_serve(data_dir: DataDir) -> Iterator[Finding]:
    """Check for a running serve, or one that left its serve.json behind."""
    try:
        record = read_record(data_dir.serve_file)
    except ServeFileInvalidError as error:
        yield warning("serve", str(error), error.hint)
        return
    if record is None:
        yield ok("serve", "not running")
    elif runs(record):
        yield ok("serve", f"running: model {record.model!r} at {' '.join(record.http_urls())}")
    else:
        yield warning(
            "serve",
            f"{data_dir.serve_file} is of a serve that was killed",
            "nothing to do: the next serve continues its requests",
        )


def check_ports(data_dir: DataDir, host: str, ports: dict[str, int]) -> Iterator[Finding]:
    """Check that the gateways' ports are free, or used by the serve of this data folder."""
    own = _own_ports(data_dir)
    for name, port in ports.items():
        subject = f"port {port} ({name})"
        if is_free(host, port):
            yield ok(subject, "free")
        elif port in own:
            yield ok(subject, "used by the running serve")
        else:
            yield problem(
                subject, f"in use on {host}", f"stop what uses it (ss -ltnp), or serve with another --{name}-port"
            )


def check_model(model: str | None) -> Iterator[Finding]:
    """Check the model folder, or the demo model."""
    found = sound_model(model)
    if isinstance(found, Path):
        found = ok("model", f"{found} ({weight_bytes(found) / 1e6:.1f} MB of weights)")
    yield found


def sound_model(model: str | None) -> Path | Finding:
    """Return the model folder, or that of the demo model; or what is wrong with it."""
    try:
        folder = find_demo_model() if model is None else Path(model).expanduser()
    except UsageError as error:
        return warning("model", str(error), error.hint)
    if wrong := model_problem(folder):
        advice = "a folder with config.json, *.safetensors and tokenizer.json is expected"
        return problem("model", f"{folder}: {wrong}", advice)
    if wrong := _weights_problem(folder):
        return problem("model", f"{folder}: {wrong}", "download or train the model again")
    return folder


def weight_bytes(folder: Path) -> int:
    """Return the size of a model's files of weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _weights_problem(folder: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="np") as tensors:
                if not list(tensors.keys()):
                    return f"{file.name} holds no tensors"
        except (SafetensorError, OSError) as error:
            return f"{file.name} cannot be read: {error}"
    return None


def is_serving(data_dir: DataDir) -> bool:
    """Whether the serve of this data folder is running."""
    try:
        record = read_record(data_dir.serve_file)
    except ServeFileInvalidError:
        return False
    return record is not None and runs(record)


def runs(record: ServeRecord) -> bool:
    """Whether the serve that wrote the record is running."""
    return any(
        process.name == "serve" and process.pid is not None and is_alive(process.pid) for process in record.processes
    )


def _own_ports(data_dir: DataDir) -> set[int]:
    try:
        record = read_record(data_dir.serve_file)
    except ServeFileInvalidError:
        return set()
    return (
        {port for process in record.processes for port in process.ports.values()} if record and runs(record) else set()
    )


LARGEST_LOADED_BYTES = 2 * 10**9
"""Weights that the check loads to measure; larger ones would take minutes, and the memory of what runs."""
LIMIT_S = 120.0
"""Of the measurement, which compiles C++ where that has not been done on this machine."""
_SUBJECT = "context"
_PROGRAM = "pagestream_worker.capacity"


def check_context(model: str | None, data_dir: DataDir) -> Iterator[Finding]:
    """Load a sound model in a process of its own, and report the longest sequence that fits.

    Args:
        model: folder; None is the demo model.
        data_dir: while its serve runs, an engine has the memory, and nothing is measured.
    """
    folder = sound_model(model)
    if isinstance(folder, Finding):
        return
    command = [sys.executable, "-m", _PROGRAM, str(folder)]
    by_hand = " ".join(command)
    size = weight_bytes(folder)
    if is_serving(data_dir):
        yield ok(_SUBJECT, f"not measured while serve runs; later: {by_hand}")
        return
    if size > LARGEST_LOADED_BYTES:
        command.insert(-1, "--check")  # reads no weights: it may be one that no engine runs
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        yield warning(_SUBJECT, f"not measured within {LIMIT_S:.0f} s", f"to try without a limit: {by_hand}")
        return
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        advice = "an engine would end with this message; PAGESTREAM_ENGINE__* variables and options change it"
        yield problem(_SUBJECT, last.removeprefix("pagestream-engine: "), advice)
        return
    if size > LARGEST_LOADED_BYTES:
        yield ok(_SUBJECT, f"not measured, as that loads {size / 1e9:.1f} GB; to do so: {by_hand}")
        return
    yield _finding(json.loads(ended.stdout.splitlines()[-1]))  # after what a plugin or modelling code prints


def _finding(capacity: dict[str, int]) -> Finding:
    longest, of_model = capacity["max_model_len"], capacity["model_context"]
    pool = f"the KV pool holds {capacity['num_sequences']:,} such sequences"
    if longest >= of_model:
        return ok(_SUBJECT, f"{longest:,} tokens, the model's own; {pool}")
    return warning(
        _SUBJECT,
        f"{longest:,} tokens of the model's {of_model:,}; {pool}",
        "free memory; on a CPU --num-gpu-blocks-override takes more than the usual quarter, at most 4 GiB",
    )
