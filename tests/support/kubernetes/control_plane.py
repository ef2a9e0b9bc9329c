"""Kubernetes without nodes: a real kube-apiserver on a real etcd. The server can be killed, and is restarted with its
objects.

Controllers run only where asked for: without kube-controller-manager nothing makes pods of a Deployment, and nothing
collects garbage. The binaries are those of `kube_binary`.
"""

from __future__ import annotations

import json
import shutil
import signal
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from support.kubernetes.api import WITH_PARENT, kube_binary, run_tool, write_kubeconfig
from support.processes.stack import free_port
from support.processes.waiting import wait_until

ADMIN_TOKEN = "admin-of-a-test"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0

Object = dict[str, Any]
T = TypeVar("T")


class Refused(Exception):  # noqa: N818 - said as the API server says it
    """The API server refused something."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class ControlPlane:
    """Used as `with ControlPlane(folder) as cluster`."""

    def __init__(self, folder: Path, *, controllers: bool = False, scheduler: bool = False) -> None:
        """`controllers` starts kube-controller-manager, `scheduler` kube-scheduler."""
        self.folder = folder
        self.port = free_port()
        self._etcd_port, self._etcd_peer_port = free_port(), free_port()
        self._controllers, self._scheduler = controllers, scheduler
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    @property
    def has_controllers(self) -> bool:
        """Whether kube-controller-manager runs."""
        return self._controllers

    @property
    def url(self) -> str:
        """Its address."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """A file with the admin's access."""
        return self.kubeconfig_at(self.port)

    def kubeconfig_at(self, port: int) -> Path:
        """A file with access by way of another port of this machine, such as a proxy's."""
        path = self.folder / f"kubeconfig-{port}"
        write_kubeconfig(path, f"https://127.0.0.1:{port}", token=ADMIN_TOKEN)
        return path

    def __enter__(self) -> Self:
        """Start all parts, and wait until the server is ready."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Short, since etcd keeps a socket there.
        self._data = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="etcd-")))
        self._key = self.folder / "accounts.key"
        subprocess.run([kube_binary("openssl"), "genrsa", "-out", self._key, "2048"], check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,1,"system:masters"\n')
        try:
            self._start_etcd()
            self.start_server()
            self.wait_ready()
            if self._controllers:
                self._start_controllers()
            if self._scheduler:
                port = str(free_port())
                self._start(
                    "kube-scheduler",
                    "--kubeconfig",
                    str(self.kubeconfig),
                    "--leader-elect=false",
                    "--secure-port",
                    port,
                    *("--kube-api-qps", "500", "--kube-api-burst", "1000"),
                )
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop all parts."""
        self.stop()

    def stop(self) -> None:
        """End all processes, those that talk to the API server first."""
        for name in reversed(list(self._processes)):
            self._end(name)
        self._stack.close()

    def start_server(self) -> None:
        """Start the API server."""
        self._start(
            "kube-apiserver",
            *("--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--secure-port", str(self.port)),
            *("--etcd-servers", f"http://127.0.0.1:{self._etcd_port}"),
            *("--cert-dir", str(self.folder / "certificates")),
            *("--authorization-mode", "RBAC", "--token-auth-file", str(self.folder / "tokens.csv")),
            *("--service-account-issuer", "https://kubernetes.default.svc.cluster.local"),
            *("--service-account-key-file", str(self._key), "--service-account-signing-key-file", str(self._key)),
            *("--service-cluster-ip-range", "10.0.0.0/20", "--allow-privileged=true"),
            *(() if self._controllers else ("--disable-admission-plugins", "ServiceAccount")),
            *("--shutdown-delay-duration", "0s", "--endpoint-reconciler-type", "none"),
        )

    def kill_server(self) -> None:
        """kill -9 of the API server; `start_server` brings it back."""
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait(STOP_LIMIT_S)

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until the API server answers and its namespaces exist."""
        wait_until(self._is_ready, f"a ready API server; see {self.folder}/kube-apiserver.log", limit_s)

    def save_data(self, folder: Path) -> None:
        """Copy the data of etcd, which stops for that, as a backup does."""
        with self._stopped():
            shutil.copytree(self._data, folder)

    def restore_data(self, folder: Path) -> None:
        """Go back to a copy of etcd's data."""
        with self._stopped():
            shutil.rmtree(self._data)
            shutil.copytree(folder, self._data)

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        self.kill_server()
        self._end("etcd")
        yield
        self._start_etcd()
        self.start_server()
        self.wait_ready()

    def request(self, method: str, path: str, body: object = None, *, kind: str = "application/json") -> Object:
        """One call. Refused where it is."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, method=method)  # noqa: S310
        request.add_header("Authorization", f"Bearer {ADMIN_TOKEN}")
        request.add_header("Content-Type", kind)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as answer:  # noqa: S310
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                content = _parsed(error.read())
            raise Refused(error.code, content.get("message") or content.get("text", "")) from None
        return _parsed(text)

    def get(self, path: str) -> Object:
        """Read an object or a list."""
        return self.request("GET", path)

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            self.get(path)
        except Refused as error:
            if error.status != 404:
                raise
            return False
        return True

    def post(self, path: str, body: Mapping[str, Any]) -> Object:
        """Create an object."""
        return self.request("POST", path, body)

    def merge(self, path: str, body: Mapping[str, Any]) -> Object:
        """Change an object."""
        return self.request("PATCH", path, body, kind="application/merge-patch+json")

    def delete(self, path: str, **options: Any) -> Object:
        """Delete an object."""
        return self.request("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options})

    def kubectl(self, *arguments: str, fails: bool = False) -> str:
        """What `kubectl` prints. CommandError where it fails, or with `fails` does not."""
        return run_tool("kubectl", *arguments, environment={"KUBECONFIG": str(self.kubeconfig)}, fails=fails)

    def _is_ready(self) -> bool:
        if self._processes["kube-apiserver"].poll() is not None:
            raise RuntimeError(f"kube-apiserver ended: {(self.folder / 'kube-apiserver.log').read_text()[-2000:]}")
        try:
            return self.exists("/readyz") and self.exists("/api/v1/namespaces/default")
        except (Refused, OSError):
            return False

    def _start_etcd(self) -> None:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._etcd_peer_port}"
        self._start(
            "etcd",
            *("--data-dir", str(self._data), "--unsafe-no-fsync", "--initial-cluster", f"default={peer}"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        )

    def _start_controllers(self) -> None:
        self._start(
            "kube-controller-manager",
            *("--kubeconfig", str(self.kubeconfig), "--leader-elect=false", "--secure-port", str(free_port())),
            *("--service-account-private-key-file", str(self._key)),
            *("--controllers", "*,-nodelifecycle,-nodeipam,-cloud-node-lifecycle,-service-lb-controller"),
            *("--kube-api-qps", "500", "--kube-api-burst", "1000"),
        )

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*WITH_PARENT, kube_binary(name), *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(2.0 if name != "etcd" else STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_LIMIT_S)


def _parsed(text: bytes) -> Object:
    try:
        found: Object = json.loads(text)
    except ValueError:
        return {"text": text.decode()}
    return found


def eventually(read: Callable[[], T], what: str, limit_s: float = 60.0) -> T:
    """Wait until `read()` returns something true, and return it. Refusals and missing objects count as not yet."""
    found: list[T] = []

    def is_there() -> bool:
        try:
            found[:] = [read()]
        except (Refused, OSError, KeyError, IndexError, TypeError):
            return False
        return bool(found[0])

    wait_until(is_there, what, limit_s)
    return found[0]
