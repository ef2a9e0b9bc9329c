"""Calls of the API server, counted, with a limit each, and with errors that say what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Self

import httpx2
from lightkube import AsyncClient
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

from pagestream_operator.children.manifest import Manifest
from pagestream_operator.errors import ApiFailure, ApiUnavailable, Conflict, Gone, Rejected, SettingsError
from pagestream_operator.kube.kinds import Kind

_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_NOT_YET = frozenset({401})  # a token that was renewed; read again at the next call
_NO_ANSWER = 0
_MALFORMED = "failed to create typed patch object"
"""How the API server refuses, with status 500, an object that server-side apply can't read."""


class KubeClient:
    """Used as `async with KubeClient(timeout_s) as client`.

    Every method raises an ApiFailure: Gone (404), Conflict (409), ApiUnavailable (no answer, 429, 5xx), or Rejected.
    Access is found as everywhere: the pod's service account, KUBECONFIG, ~/.kube/config.
    """

    def __init__(self, timeout_s: float) -> None:
        """SettingsError where there is no access."""
        try:
            self._client = AsyncClient(timeout=httpx2.Timeout(timeout_s))
        except ConfigError as error:
            raise SettingsError(f"no access to Kubernetes: {error}; set KUBECONFIG, or run in a pod") from error
        self.calls: Counter[tuple[str, int]] = Counter()
        """Calls by verb and HTTP status, 0 where there was no answer."""

    async def __aenter__(self) -> Self:
        """Nothing is opened before the first call."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes connections."""
        await self._client.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """Read an object."""
        async with self._call("get", kind, namespace, name):
            return dict(await self._client.get(_resource(kind), name, namespace=namespace))

    async def list(self, kind: Kind, namespace: str | None) -> list[Manifest]:
        """All objects that are watched of a kind, in one namespace or all."""
        found: list[Manifest] = []
        async with self._call("list", kind, namespace, ""):
            selector: Any = _parse_selector(kind.label_selector)
            listed = self._client.list(_resource(kind), namespace=namespace or "*", labels=selector, chunk_size=500)
            async for each in listed:
                found.append(dict(each))
        return found

    async def create(self, kind: Kind, body: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object."""
        metadata = body["metadata"]
        async with self._call("create", kind, metadata["namespace"], metadata.get("name", "")):
            return dict(await self._client.create(_resource(kind)(body), dry_run=dry_run))

    async def replace(self, kind: Kind, body: Manifest) -> Manifest:
        """Replace an object that has not moved on since `body` was read."""
        metadata = body["metadata"]
        async with self._call("update", kind, metadata["namespace"], metadata["name"]):
            return dict(await self._client.replace(_resource(kind)(body)))

    async def replace_status(self, kind: Kind, body: Manifest) -> Manifest:
        """Replace an object's status, if it has not moved on since `body` was read."""
        metadata = body["metadata"]
        async with self._call("update", kind, metadata["namespace"], metadata["name"]):
            status = _resource(kind).Status(body)
            return dict(await self._client.replace(status, metadata["name"], namespace=metadata["namespace"]))

    async def apply(self, body: Manifest, kind: Kind, *, manager: str) -> Manifest:
        """Server-side apply. With `metadata.resourceVersion`, only if the object has not moved on since."""
        metadata = body["metadata"]
        async with self._call("apply", kind, metadata["namespace"], metadata["name"]):
            done = await self._client.patch(
                _resource(kind),
                metadata["name"],
                body,
                namespace=metadata["namespace"],
                patch_type=PatchType.APPLY,
                field_manager=manager,
                force=True,
            )
            return dict(done)

    async def apply_scale(
        self, kind: Kind, namespace: str, name: str, replicas: int, *, version: str, manager: str
    ) -> str:
        """Set an object's replicas through its scale, if it has not moved on since `version`; returns its new one."""
        body = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": version},
            "spec": {"replicas": replicas},
        }
        async with self._call("scale", kind, namespace, name):
            scale = await self._client.patch(
                _resource(kind).Scale,
                name,
                body,
                namespace=namespace,
                patch_type=PatchType.APPLY,
                field_manager=manager,
                force=True,
            )
            new: str = scale.metadata.resourceVersion
            return new

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], *, manager: str) -> Manifest:
        """Merge a change into an object."""
        async with self._call("patch", kind, namespace, name):
            done = await self._client.patch(
                _resource(kind),
                name,
                dict(patch),
                namespace=namespace,
                patch_type=PatchType.MERGE,
                field_manager=manager,
            )
            return dict(done)

    @asynccontextmanager
    async def _call(self, verb: str, kind: Kind, namespace: str | None, name: str) -> AsyncIterator[None]:
        what = f"{verb} {kind.name} {namespace or '*'}/{name}"
        status = 200
        try:
            yield
        except httpx2.HTTPStatusError as error:
            failure = failure_of(what, error)
            status = failure.status
            raise failure from error
        except (httpx2.HTTPError, ConfigError, ValueError) as error:
            status = _NO_ANSWER
            raise ApiUnavailable(f"{what}: {type(error).__name__} {error}") from error
        finally:
            self.calls[(verb, status)] += 1


@cache
def _resource(kind: Kind) -> Any:
    return create_namespaced_resource(kind.group, kind.version, kind.name, kind.plural)


def _parse_selector(text: str | None) -> dict[str, str] | None:
    return None if text is None else dict(part.split("=") for part in text.split(","))


def failure_of(what: str, error: httpx2.HTTPStatusError) -> ApiFailure:
    """What an answer of the API server means to whoever asked."""
    # An error in a stream has no response of its own.
    status = error.response.status_code if error.response is not None else _NO_ANSWER
    text = f"{what}: {status} {error}"
    if status == httpx2.codes.NOT_FOUND:
        return Gone(text, status)
    if status == httpx2.codes.CONFLICT:
        return Conflict(text, status)
    if (status in _BUSY or status in _NOT_YET) and _MALFORMED not in text:
        return ApiUnavailable(text, status, retry_after_s=_retry_after(error.response.headers.get("Retry-After")))
    return Rejected(text, status)


def _retry_after(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() else None
