"""The sources of an earlier commit, to run its processes beside those of this one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.processes.part import Part
from support.processes.stack import ROOT, Gateway, Stack, free_port
from support.redis.servers import skip_for_want_of

PACKAGES = ("proto", "kernels", "operator", "services")
GIT_LIMIT_S = 60.0


class EarlierSources:
    """A commit's packages in a folder of their own. Their dependencies are this environment's."""

    def __init__(self, commit: str, folder: Path) -> None:
        """Unpack `commit` into `folder`; skip the test where this checkout has no git or not so much history."""
        git = shutil.which("git")
        if git is None or not (ROOT / ".git").exists():
            skip_for_want_of("history", "this is no git checkout, so that there is no earlier commit to run")
        command = [str(git), "-C", str(ROOT), "archive", "--format=tar", commit, *PACKAGES]
        archive = subprocess.run(command, capture_output=True, check=False, timeout=GIT_LIMIT_S)
        if archive.returncode:
            skip_for_want_of("history", f"git has no commit {commit} here: {archive.stderr.decode().strip()}")
        folder.mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True, timeout=GIT_LIMIT_S)
        sources = [str(path) for path in sorted(folder.glob("*/src")) + sorted(folder.glob("services/*/src"))]
        self.environment = {"PYTHONPATH": os.pathsep.join(sources)}
        self._folder = folder

    def add_engine(self, stack: Stack, model: Path, options: Sequence[str], environment: dict[str, str]) -> Part:
        """Start an engine of the earlier commit on the stack's Redis."""
        name = f"earlier-engine-{len(stack.engines)}"
        command = [sys.executable, "-m", "pagestream_engine.worker", str(model), "--redis", stack.redis_url]
        command += ["--served-model-name", stack.served_model_name, "--engine-id", name, *options]
        part = Part(name, command, stack.folder / f"{name}.log", {**self.environment, **environment})
        part.start()
        stack.engines.append(part)
        return part

    def add_gateway(self, stack: Stack) -> Gateway:
        """Start a gateway of the earlier commit on the stack's Redis."""
        name = f"earlier-gateway-{len(stack.gateways)}"
        http_port, grpc_port = free_port(), free_port()
        command = [sys.executable, "-m", "pagestream_gateway", "--redis", stack.redis_url, "--gateway-id", name]
        command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        log = stack.folder / f"{name}.log"
        part = Gateway(name, command, log, self.environment, http_port=http_port, grpc_port=grpc_port)
        part.start()
        stack.gateways.append(part)
        return part
