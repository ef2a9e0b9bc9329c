"""Access to the API server, and its calls over aiohttp: counted, each with a time limit, with errors by what a caller
can do next. The watches of kopf use the same access.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import kopf
import yaml
from pagestream_telemetry import join_address

from pagestream_operator.errors import ApiFailure, ApiUnavailable, Conflict, Gone, Rejected, SettingsError
from pagestream_operator.kube.kinds import Kind

_HOLD_S = 60.0
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


def find_access(**_: Any) -> kopf.ConnectionInfo:
    """Read the pod's service account, else the file of KUBECONFIG, else ~/.kube/config.

    Called again after each 401, since the kubelet rotates the token of a service account.

    Raises:
        SettingsError: there is none of them, or it can't be read.
    """
    settings = kopf.OperatorSettings()
    try:
        account = kopf.login_with_service_account(settings=settings)
        found = _by_address(account) if account is not None else kopf.login_with_kubeconfig(settings=settings)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, kopf.LoginError) as error:
        raise SettingsError(
            f"the access to Kubernetes can't be read ({type(error).__name__}: {error}): set KUBECONFIG, or run in a pod"
        ) from error
    if found is None or not found.server:
        raise SettingsError(
            "no access to Kubernetes, neither a pod's service account nor a kubeconfig: set KUBECONFIG, or run in a pod"
        )
    if found.server.startswith("https:") and not _has_credentials(found):
        raise SettingsError(
            "the kubeconfig's user has no token, no password and no client certificate; exec plugins and tokenFile are "
            "not supported: give one of the former, or run in a pod"
        )
    return found


def open_session(access: kopf.ConnectionInfo, on_answer: Callable[[str, bool, int], bool]) -> kopf.AiohttpSession:
    """Open a session for kopf, as kopf would by itself.

    Args:
        on_answer: called with each answer's path (without that of the API server's own address), whether it begins a
            watch, and its status; 0: there was none. Where it returns True, the answer is kept back: kopf would end
            by it, and its end in good order needs a moment.
    """
    own_path = urlsplit(access.server).path.rstrip("/")

    async def report(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        path, is_watch = request.url.path.removeprefix(own_path), request.url.query.get("watch") == "true"
        try:
            answer = await send(request)
        except (aiohttp.ClientError, OSError):
            if on_answer(path, is_watch, 0):
                await asyncio.sleep(_HOLD_S)
            raise
        try:
            if on_answer(path, is_watch, answer.status):
                await asyncio.sleep(_HOLD_S)
        except BaseException:
            answer.close()
            raise
        return answer

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=access.as_ssl_context()),
        headers=access.as_http_headers(),
        proxy=access.proxy_url,
        trust_env=access.trust_env,
        middlewares=(report,),
    )
    return kopf.AiohttpSession(
        server=access.server, default_namespace=access.default_namespace, aiohttp_session=session
    )


def _has_credentials(found: kopf.ConnectionInfo) -> bool:
    return bool(found.token or found.username or found.certificate_path or found.certificate_data)


def _by_address(account: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """Reach the API server by its Service's address, so that an outage of DNS costs no leadership."""
    host, port = os.environ.get(_HOST, ""), os.environ.get(_PORT, "")
    if not host or not port:
        return account
    return dataclasses.replace(account, server=f"https://{join_address(host, int(port))}")


logger = logging.getLogger(__name__)

Object: TypeAlias = dict[str, Any]

_JSON, _MERGE, _APPLY = "application/json", "application/merge-patch+json", "application/apply-patch+yaml"
_UNAUTHORIZED, _NOT_FOUND, _CONFLICT, _TOO_LATE = 401, 404, 409, 504
_FIRST_ERROR = 300  # redirects are not followed: they would turn a POST into a GET
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_NO_ANSWER = 0
_REFUSAL = re.compile(r"failed to (create typed patch object|convert new object)|denied (the )?request")
"""What the API server answers to an object that server-side apply can't read, with status 500, and where a webhook or
a policy refuses an object, with a status of their choice. It is a refusal."""
_SERVER_SHARE = 0.8
"""Of a write's time limit, after which the API server itself gives up: it is known to be there then."""
_HANGING = "; does an admission webhook hang?"
_SAME_TIME_S = 5.0
"""A difference up to this between two clocks is none: an answer has its time in whole seconds, and takes its way."""
_CHUNK = 500
"""Objects of one page of a list."""


@dataclass(frozen=True)
class _Request:
    """One call."""

    verb: str
    """How it is counted."""
    method: str
    kind: Kind
    namespace: str | None
    name: str = ""
    subresource: str = ""
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    content: str = _JSON

    @property
    def path(self) -> str:
        """A new object is posted to the list of its kind."""
        return self.kind.path(self.namespace, "" if self.method == "POST" else self.name, self.subresource)

    def __str__(self) -> str:
        return f"{self.verb} {self.kind.name} {self.namespace or '*'}/{self.name}"


class KubeClient:
    """A client of the API server: `async with KubeClient(timeout_s) as client`.

    Objects are plain dictionaries. A call that ends with 401 is sent once more if the access, read anew, differs.
    Every call raises an ApiFailure: Gone (404), Conflict (409), ApiUnavailable (no answer, 401, 429, 5xx) or Rejected.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.time) -> None:
        """Find the access.

        Args:
            timeout_s: limits each call, a list's pages one by one.
            clock: Unix seconds of this process.

        Raises:
            SettingsError: there is no access.
        """
        self._access = find_access()
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._server_limit = f"{round(1000 * _SERVER_SHARE * timeout_s)}ms"
        self._clock = clock
        self._session: aiohttp.ClientSession
        self.ahead_s = 0.0
        """Seconds by which the API server's clock, which times of objects are from, is ahead of this process'."""
        self.calls: Counter[tuple[str, int]] = Counter()
        """Calls by verb and HTTP status; 0: there was no answer."""

    async def __aenter__(self) -> Self:
        """Open the session. Nothing is connected before the first call. SettingsError: a certificate can't be read."""
        try:
            tls = self._access.as_ssl_context()
        except (OSError, ValueError) as error:
            raise SettingsError(f"the certificates of the access to Kubernetes can't be read: {error}") from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls),
            timeout=self._timeout,
            proxy=self._access.proxy_url,
            trust_env=self._access.trust_env,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._session.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """Read an object. `namespace` is None for kinds of the whole cluster."""
        return await self._send(_Request("get", "GET", kind, namespace, name))

    async def list(self, kind: Kind, namespace: str | None, selector: str | None = None) -> list[Object]:
        """Read all objects of a kind in one namespace, or in all where it is None.

        Args:
            kind: what to list.
            namespace: where; None for all namespaces.
            selector: a label selector; the kind's own unless given.
        """
        chosen = kind.label_selector if selector is None else selector
        query = {"limit": str(_CHUNK)} | ({"labelSelector": chosen} if chosen else {})
        found: list[Object] = []
        while True:
            page = await self._send(_Request("list", "GET", kind, namespace, query=query))
            # The items of a list don't name their kind, and would differ from what is read or applied one by one.
            found += [{"apiVersion": kind.api_version, "kind": kind.name, **item} for item in page.get("items") or []]
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return found
            query = {**query, "continue": following}

    async def create(self, kind: Kind, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object. With `dry_run` it is only checked, admission included."""
        query = {"dryRun": "All"} if dry_run else {}
        return await self._send(_Request("create", "POST", kind, *_place_of(body), body=body, query=query))

    async def replace(self, kind: Kind, body: Object, *, subresource: str = "") -> Object:
        """Replace an object, or a subresource of it such as `status`.

        It raises Conflict if the object has changed since `body` was read.
        """
        return await self._send(_Request("update", "PUT", kind, *_place_of(body), subresource, body=body))

    async def apply(self, kind: Kind, body: Object, *, manager: str) -> Object:
        """Apply an object on the server's side. With `metadata.resourceVersion`: Conflict if it has changed since."""
        query = {"fieldManager": manager, "force": "true"}
        return await self._send(
            _Request("apply", "PATCH", kind, *_place_of(body), body=body, query=query, content=_APPLY)
        )

    async def apply_scale(
        self, kind: Kind, namespace: str, name: str, replicas: int, *, version: str, manager: str
    ) -> str:
        """Set an object's replicas through its scale; returns its new version.

        It raises Conflict if the object has changed since `version`.
        """
        body = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": version},
            "spec": {"replicas": replicas},
        }
        query = {"fieldManager": manager, "force": "true"}
        scale = await self._send(
            _Request("scale", "PATCH", kind, namespace, name, "scale", body=body, query=query, content=_APPLY)
        )
        return str(scale["metadata"]["resourceVersion"])

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, manager: str) -> Object:
        """Merge a change into an object."""
        query = {"fieldManager": manager}
        return await self._send(
            _Request("patch", "PATCH", kind, namespace, name, body=patch, query=query, content=_MERGE)
        )

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None) -> None:
        """Delete an object; its finalizers may keep it. With `uid` it raises Conflict if another one has its name."""
        body = None if uid is None else {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        await self._send(_Request("delete", "DELETE", kind, namespace, name, body=body))

    async def _send(self, request: _Request) -> Object:
        status, used = _NO_ANSWER, self._access.as_http_headers()
        try:
            status, text, retry_after = await self._exchange(request)
            if status == _UNAUTHORIZED and self._has_new_access(used):
                status, text, retry_after = await self._exchange(request)
            if status >= _FIRST_ERROR:
                hint = _HANGING if status == _TOO_LATE and request.method != "GET" else ""
                raise failure_of(str(request), status, _message(text) + hint, retry_after)
            found: Object = json.loads(text)
            if not isinstance(found, dict):
                raise ValueError(f"the answer is no object: {text[:200]!r}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            status = _NO_ANSWER
            raise ApiUnavailable(f"{request}: {type(error).__name__} {error}") from error
        finally:
            self.calls[(request.verb, status)] += 1
        return found

    async def _exchange(self, request: _Request) -> tuple[int, bytes, str | None]:
        """Send a request; returns the answer's status, body and Retry-After."""
        async with self._session.request(
            request.method,
            self._access.server.rstrip("/") + request.path,
            params=request.query if request.method == "GET" else {**request.query, "timeout": self._server_limit},
            data=None if request.body is None else json.dumps(request.body).encode(),
            allow_redirects=False,
            headers={**self._access.as_http_headers(), "Content-Type": request.content, "Accept": _JSON},
        ) as response:
            self._note_time(response.headers.get("Date"))
            return response.status, await response.read(), response.headers.get("Retry-After")

    def _note_time(self, date: str | None) -> None:
        """Note the time of an answer. A difference that stays about the same doesn't change, so that ages don't."""
        try:
            ahead_s = parsedate_to_datetime(date or "").timestamp() - self._clock()
        except (ValueError, OverflowError):
            return
        if abs(ahead_s - self.ahead_s) <= _SAME_TIME_S:
            return
        self.ahead_s = 0.0 if abs(ahead_s) <= _SAME_TIME_S else ahead_s
        logger.warning("this process' clock isn't the API server's", extra={"seconds_behind": round(self.ahead_s)})

    def _has_new_access(self, used: Mapping[str, str]) -> bool:
        """Read the access again; returns whether it differs from what was `used`, perhaps since another call's 401."""
        self._access = find_access()
        return self._access.as_http_headers() != used


def failure_of(what: str, status: int, message: str, retry_after: str | None = None) -> ApiFailure:
    """Translate an answer of the API server into an error.

    Args:
        what: what was tried.
        status: HTTP status of the answer.
        message: what the server wrote.
        retry_after: its header of that name, in seconds; a date is ignored.
    """
    text = f"{what}: {status} {message}"
    if _REFUSAL.search(message):
        return Rejected(text, status)
    if status == _NOT_FOUND:
        return Gone(text, status)
    if status == _CONFLICT:
        return Conflict(text, status)
    if status in _BUSY or status == _UNAUTHORIZED:
        seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
        return ApiUnavailable(text, status, retry_after_s=seconds)
    return Rejected(text, status)


def _place_of(body: Object) -> tuple[str | None, str]:
    metadata = body["metadata"]
    return metadata.get("namespace"), metadata.get("name", "")


def _message(body: bytes) -> str:
    """The message of a Status object; of another answer, its beginning."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
