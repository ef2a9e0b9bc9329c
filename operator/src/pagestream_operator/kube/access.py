"""Where the API server is and how to authenticate, for the watches of kopf and for the calls of `KubeClient` alike."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import kopf
import yaml
from pagestream_telemetry import join_address

from pagestream_operator.errors import SettingsError

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
