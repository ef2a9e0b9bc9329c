"""Where the API server is and how to authenticate, for the watches of kopf and for the calls of `KubeClient` alike."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import kopf
import yaml

from pagestream_operator.errors import SettingsError

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


def _has_credentials(found: kopf.ConnectionInfo) -> bool:
    return bool(found.token or found.username or found.certificate_path or found.certificate_data)


def _by_address(account: kopf.ConnectionInfo) -> kopf.ConnectionInfo:
    """Reach the API server by its Service's address, so that an outage of DNS costs no leadership."""
    host, port = os.environ.get(_HOST, ""), os.environ.get(_PORT, "")
    if not host or not port:
        return account
    return dataclasses.replace(account, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")
