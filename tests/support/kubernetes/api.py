"""Kubernetes' command line tools, for tests.

The binaries are looked for where the ecosystem's test tools look: in the folder KUBEBUILDER_ASSETS, then on the PATH.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes.waiting import LIMIT_S
from support.redis.servers import skip_for_want_of


def kube_binary(name: str) -> str:
    """The path of one of Kubernetes' binaries, or of a tool around it. Skips where it is missing."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    found = shutil.which(name, path=folder) if folder else None
    found = found or shutil.which(name)
    if found is None:
        skip_for_want_of("kube", f"{name} is neither in KUBEBUILDER_ASSETS nor on the PATH")
        raise AssertionError
    return found


class CommandError(AssertionError):
    """A command failed, or what was waited for did not come; the message is what was written to stderr."""


@dataclass(frozen=True)
class Administrator:
    """Runs kubectl and helm against a cluster."""

    kubeconfig: Path

    def run(self, *command: str, text: str | None = None) -> str:
        """Run a command; returns its stdout. Raises CommandError."""
        return run_tool(*command, text=text, environment={"KUBECONFIG": str(self.kubeconfig)})

    def get(self, *arguments: str) -> Any:
        """The object or list that `kubectl get` finds."""
        return json.loads(self.run("kubectl", "get", *arguments, "--output", "json"))

    def apply(self, manifest: str) -> None:
        """Create or change objects."""
        self.run("kubectl", "apply", "--server-side", "--filename", "-", text=manifest)


def run_tool(
    *command: str,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
    fails: bool = False,
) -> str:
    """Run a command; return stdout, or with `fails` the stderr of one that must fail. Raises CommandError."""
    program, variables = kube_binary(command[0]), {**os.environ, **(environment or {})}
    try:
        result = subprocess.run(
            [program, *command[1:]],
            input=text, capture_output=True, text=True, env=variables, timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{' '.join(command)}: no end after {limit_s:.0f} s") from error
    if (result.returncode != 0) != fails:
        output = f"{result.stderr}\n{result.stdout[-2000:]}"
        raise CommandError(f"{' '.join(command)}: exit status {result.returncode}\n{output}")
    return result.stderr if fails else result.stdout


def write_kubeconfig(path: Path, server: str, *, token: str) -> None:
    """Write a kubeconfig with access by a token. The server's certificate isn't checked."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(config))
