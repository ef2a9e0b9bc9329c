"""Kubernetes without nodes: a real kube-apiserver on a real etcd. Both can be killed, and are restarted with their
objects.

Controllers run only where asked for: without kube-controller-manager nothing makes pods of a Deployment, and nothing
collects garbage. The binaries are those of `kube_binary`.
"""

from __future__ import annotations

import json
import select
import shutil
import signal
import ssl
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from support.kubernetes.api import CommandError, kube_binary, run_tool, write_kubeconfig
from support.processes.part import WITH_PARENT
from support.processes.stack import free_port
from support.processes.waiting import LIMIT_S, wait_until

ADMIN_TOKEN = "admin-of-a-test"
STOP_LIMIT_S = 10.0
CALL_LIMIT_S = 10.0

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

    def __init__(
        self,
        folder: Path,
        *,
        controllers: bool = False,
        scheduler: bool = False,
        options: tuple[str, ...] = (),
        services: str = "10.0.0.0/20",
    ) -> None:
        """`controllers` starts kube-controller-manager, `scheduler` kube-scheduler; `options` are flags of the
        server; `services` the addresses of Services, of both families separated by a comma: by the first one's family
        all processes reach one another, and no other."""
        self.folder, self._services = folder, services
        self._host = "::1" if ":" in services.partition(",")[0] else "127.0.0.1"
        self._place = f"[{self._host}]" if ":" in self._host else self._host
        self.port = free_port()
        self._etcd_port, self._etcd_peer_port = free_port(), free_port()
        self._controllers, self._scheduler, self._options = controllers, scheduler, options
        self._connections = _Connections(self._host, self.port)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    @property
    def has_controllers(self) -> bool:
        """Whether kube-controller-manager runs."""
        return self._controllers

    @property
    def url(self) -> str:
        """Its address."""
        return f"https://{self._place}:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """A file with the admin's access."""
        return self.kubeconfig_at(self.port)

    def kubeconfig_at(self, port: int) -> Path:
        """A file with access by way of another port of this machine, such as a proxy's."""
        path = self.folder / f"kubeconfig-{port}"
        write_kubeconfig(path, f"https://{self._place}:{port}", token=ADMIN_TOKEN)
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
            self.start_etcd()
            self.start_server()
            self.wait_ready()
            if self._controllers:
                self.start_controllers()
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
        self._connections.close()
        self._stack.close()

    def start_server(self) -> None:
        """Start the API server."""
        self._start(
            "kube-apiserver",
            *("--bind-address", self._host, "--advertise-address", self._host, "--secure-port", str(self.port)),
            *("--etcd-servers", f"http://{self._place}:{self._etcd_port}"),
            *("--cert-dir", str(self.folder / "certificates")),
            *("--authorization-mode", "RBAC", "--token-auth-file", str(self.folder / "tokens.csv")),
            *("--service-account-issuer", "https://kubernetes.default.svc.cluster.local"),
            *("--service-account-key-file", str(self._key), "--service-account-signing-key-file", str(self._key)),
            *("--service-cluster-ip-range", self._services, "--allow-privileged=true"),
            *(() if self._controllers else ("--disable-admission-plugins", "ServiceAccount")),
            *("--shutdown-delay-duration", "0s", "--endpoint-reconciler-type", "none"),
            *self._options,
        )

    def kill_server(self) -> None:
        """kill -9 of the API server; `start_server` brings it back."""
        self._kill("kube-apiserver")

    def kill_etcd(self) -> None:
        """kill -9 of etcd; `start_etcd` brings it back with all that it has acknowledged."""
        self._kill("etcd")

    def restart_controllers(self) -> None:
        """End kube-controller-manager, whose pauses between tries grow to a minute, and start it again."""
        self._end("kube-controller-manager")
        self.start_controllers()

    def wait_ready(self, limit_s: float = LIMIT_S) -> None:
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
        self.start_etcd()
        self.start_server()
        self.wait_ready()

    def request(self, method: str, path: str, body: object = None, *, kind: str = "application/json") -> Object:
        """One call. Refused where it is."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": kind}
        status, text = self._connections.exchange(method, path, data, headers)
        content = _parsed(text)
        if status >= HTTPStatus.BAD_REQUEST:
            raise Refused(status, content.get("message") or content.get("text", ""))
        return content

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

    def kubectl(self, *arguments: str, fails: bool = False, check: bool = True) -> str:
        """What `kubectl` prints. CommandError where it fails, or with `fails` does not; without `check` its text."""
        try:
            return run_tool("kubectl", *arguments, environment={"KUBECONFIG": str(self.kubeconfig)}, fails=fails)
        except CommandError as error:
            if check:
                raise
            return str(error)

    def _is_ready(self) -> bool:
        if self._processes["kube-apiserver"].poll() is not None:
            raise RuntimeError(f"kube-apiserver ended: {(self.folder / 'kube-apiserver.log').read_text()[-2000:]}")
        try:
            return self.exists("/readyz") and self.exists("/api/v1/namespaces/default")
        except (Refused, OSError):
            return False

    def start_etcd(self) -> None:
        """Start etcd."""
        client, peer = (f"http://{self._place}:{port}" for port in (self._etcd_port, self._etcd_peer_port))
        self._start(
            "etcd",
            *("--data-dir", str(self._data), "--unsafe-no-fsync", "--initial-cluster", f"default={peer}"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        )

    _start_etcd = start_etcd

    def start_controllers(self) -> None:
        """Start kube-controller-manager."""
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

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait(LIMIT_S)

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(2.0 if name != "etcd" else STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(LIMIT_S)


class _Connections:
    """Connections to a port of this machine, each used by one thread at a time, and kept between calls: a handshake
    costs both sides more than a call.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: deque[HTTPSConnection] = deque()
        # Without the machine's certificate authorities, which take longer to read than a call.
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE

    def exchange(self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send a request; returns status and body. OSError without an answer."""
        connection = self._take()
        try:
            connection.request(method, path, data, dict(headers))
            answer = connection.getresponse()
            text = answer.read()
        except HTTPException as error:
            connection.close()
            raise ConnectionError(f"{method} {path}: {type(error).__name__} {error}") from error
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer.status, text

    def close(self) -> None:
        """Close those that are not in use."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _take(self) -> HTTPSConnection:
        with suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                    return connection
                connection.close()  # the server has closed it
        return HTTPSConnection(self._host, self._port, timeout=CALL_LIMIT_S, context=self._tls)


def _parsed(text: bytes) -> Object:
    try:
        found: Object = json.loads(text)
    except ValueError:
        return {"text": text.decode()}
    return found


def eventually(read: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """Wait until `read()` returns something true, and return it. Refusals and missing objects count as not yet.

    The longer it waits, the longer its pauses: a call takes 3 ms of the processor from those that are waited for.
    """
    found: list[T] = []

    def is_there() -> bool:
        try:
            found[:] = [read()]
        except (Refused, OSError, KeyError, IndexError, TypeError):
            return False
        return bool(found[0])

    wait_until(is_there, what, limit_s, late=0.1)
    return found[0]
