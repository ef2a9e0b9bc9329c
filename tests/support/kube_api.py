"""A real Kubernetes API server on a real etcd, without nodes: what it stores and refuses is real, nothing runs.

The binaries are looked for where the ecosystem's test tools look: in the folder KUBEBUILDER_ASSETS, then on the PATH.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from redis_servers import skip_for_want_of
from stack import Part, free_port, wait_until

START_LIMIT_S = 60.0
COMMAND_LIMIT_S = 60.0
TOKEN = "tests"  # of a server that lives for one test session on the loopback interface


def kube_binary(name: str) -> str:
    """The path of one of Kubernetes' binaries, or of a tool around it. Skips where it is missing."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    found = shutil.which(name, path=folder) if folder else None
    found = found or shutil.which(name)
    if found is None:
        skip_for_want_of("kube", f"{name} is neither in KUBEBUILDER_ASSETS nor on the PATH")
        raise AssertionError
    return found


@dataclass(frozen=True)
class KubeApi:
    """A running API server, and its administrator."""

    folder: Path
    port: int
    etcd: Part
    server: Part

    @property
    def url(self) -> str:
        """Base of its addresses."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """A configuration file for kubectl, helm and client libraries."""
        return self.folder / "kubeconfig"

    @property
    def environment(self) -> dict[str, str]:
        """What a client's process needs to find it."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)}

    def run(self, *command: str, text: str | None = None, fails: bool = False) -> str:
        """Runs kubectl or helm against it; returns stdout, or stderr where it `fails` as it must."""
        binary = kube_binary(command[0])
        result = subprocess.run(
            [binary, *command[1:]],
            input=text,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
        if (result.returncode != 0) != fails:
            raise AssertionError(f"{' '.join(command)}: exit status {result.returncode}\n{result.stderr}")
        return result.stderr if fails else result.stdout

    def get(self, *command: str) -> Any:
        """The object or list that `kubectl get` finds."""
        return json.loads(self.run("kubectl", "get", *command, "--output", "json"))

    def apply(self, manifest: str) -> None:
        """Creates or changes objects."""
        self.run("kubectl", "apply", "--server-side", "--filename", "-", text=manifest)

    def client(self) -> httpx.Client:
        """An HTTP client with the administrator's token."""
        return httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {TOKEN}"},
            verify=str(_certificate(self.folder)),
            timeout=COMMAND_LIMIT_S,
        )

    def is_ready(self) -> bool:
        """Whether it serves."""
        if not self.server.is_alive() or not self.etcd.is_alive():
            raise AssertionError(f"the API server has ended:\n{self.server.log_tail()}\n{self.etcd.log_tail()}")
        try:
            with self.client() as client:
                return client.get("/readyz").status_code == httpx.codes.OK
        except (OSError, httpx.HTTPError):
            return False

    def wait_ready(self) -> None:
        """Waits until it serves, and has the namespace that clients take when they name none."""
        wait_until(self.is_ready, limit_s=START_LIMIT_S, what="kube-apiserver")
        wait_until(self._has_default_namespace, limit_s=START_LIMIT_S, what="the namespace default")

    def _has_default_namespace(self) -> bool:
        with self.client() as client:
            return client.get("/api/v1/namespaces/default").status_code == httpx.codes.OK


@contextmanager
def running_kube_api(folder: Path, *, options: Sequence[str] = ()) -> Iterator[KubeApi]:
    """An API server for the length of a block. `options`: more flags of kube-apiserver, which win over those here."""
    folder.mkdir(parents=True, exist_ok=True)
    port, etcd_port, peer_port = free_port(), free_port(), free_port()
    etcd = Part("etcd", _etcd_command(folder, etcd_port, peer_port), folder / "etcd.log")
    command = [*_server_command(folder, port, etcd_port), *options]
    api = KubeApi(folder, port, etcd, Part("kube-apiserver", command, folder / "kube-apiserver.log"))
    _write_kubeconfig(api)
    try:
        etcd.start()
        api.server.start()
        api.wait_ready()
        yield api
    finally:
        api.server.stop()
        etcd.stop()


def _etcd_command(folder: Path, port: int, peer_port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    flags = {
        "data-dir": str(folder / "etcd"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "log-level": "warn",
    }
    return [kube_binary("etcd"), "--unsafe-no-fsync", *_flags(flags)]


def _server_command(folder: Path, port: int, etcd_port: int) -> list[str]:
    key = folder / "service-accounts.key"
    subprocess.run([kube_binary("openssl"), "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{TOKEN},administrator,administrator,"system:masters"\n')
    flags = {
        "bind-address": "127.0.0.1",
        "secure-port": str(port),
        "etcd-servers": f"http://127.0.0.1:{etcd_port}",
        "cert-dir": str(folder / "certificates"),
        "authorization-mode": "RBAC",
        "token-auth-file": str(tokens),
        "service-cluster-ip-range": "10.0.0.0/24",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": str(key),
        "service-account-signing-key-file": str(key),
        # Nobody makes the accounts of new namespaces here.
        "disable-admission-plugins": "ServiceAccount",
        "profiling": "false",
    }
    return [kube_binary("kube-apiserver"), *_flags(flags)]


def _flags(flags: Mapping[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def _certificate(folder: Path) -> Path:
    """What the server made for itself, with the authority that signed it."""
    return folder / "certificates" / "apiserver.crt"


def _write_kubeconfig(api: KubeApi) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "tests", "cluster": {"server": api.url, "certificate-authority": str(_certificate(api.folder))}}
        ],
        "users": [{"name": "administrator", "user": {"token": TOKEN}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "administrator"}}],
        "current-context": "tests",
    }
    api.kubeconfig.write_text(json.dumps(config))
