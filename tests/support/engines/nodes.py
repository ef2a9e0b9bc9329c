"""Machines of a group as processes: a follower with ranks of the arithmetic model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from pagestream_engine.config import EngineConfig
from pagestream_engine.executor.nodes.follower import run_node
from support.engines.faulty_runners import FaultyRunner
if __name__ == "__main__":
    sys.exit(run_node(sys.argv[1], EngineConfig.from_options(json.loads(sys.argv[2])), FaultyRunner) or 0)
"""


def node_options(folder: Path, **options: Any) -> dict[str, Any]:
    """Return options of a group of two machines with a rank each, on a free port, with a secret in the folder."""
    secret = folder / "secret"
    secret.write_text("0123456789abcdef" * 2)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "master_port": port,
        "node_secret_file": str(secret),
        "node_join_timeout_s": 120.0,
        **options,
    }


def start_follower(folder: Path, options: Mapping[str, Any]) -> subprocess.Popen[str]:
    """Start machine 1; it ends with an error's exit code where the group does not end orderly."""
    program = folder / "follower.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(folder), json.dumps({**options, "node_rank": 1})]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)


def start_node(model: Path, options: Mapping[str, Any]) -> subprocess.Popen[str]:
    """Start `pagestream-engine` as machine 1, with its options as variables."""
    given = {f"PAGESTREAM_ENGINE__{name.upper()}": str(value) for name, value in options.items()}
    command = [sys.executable, "-m", "pagestream_worker", str(model), "--node-rank", "1"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **given})
