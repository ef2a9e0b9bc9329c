"""A client of the API server for commands that run once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.core.exceptions import ConfigError

from pagestream_operator.errors import ApiUnavailable, Conflict, Gone, OperatorError, Rejected

FIELD_MANAGER = "pagestream-crd"
POLL_S = 0.5
_REQUEST_S = 10.0
_BUSY = (429, 500, 502, 503, 504)


def open_client() -> Client:
    """A client by the pod's account, or by KUBECONFIG. ApiUnavailable where there is neither."""
    try:
        config = KubeConfig.from_env()
        return Client(config, field_manager=FIELD_MANAGER, timeout=httpx2.Timeout(_REQUEST_S), trust_env=False)
    except (ConfigError, OSError) as error:
        raise ApiUnavailable(f"no way to the API server, neither a pod's account nor KUBECONFIG: {error}") from error


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raises the client library's errors as this package's; `what` was tried."""
    try:
        yield
    except ApiError as error:
        status = error.status.code or 0
        kinds = {404: Gone, 409: Conflict}
        kind = ApiUnavailable if status in _BUSY else kinds.get(status, Rejected)
        raise kind(f"{what}: {error.status.message}", status) from error
    except httpx2.HTTPError as error:
        raise ApiUnavailable(f"{what}: {str(error) or type(error).__name__}") from error


def wait_until(condition: Callable[[], bool], *, limit_s: float) -> bool:
    """Asks until the condition holds; False after the limit. ApiUnavailable where the last answer failed to come."""
    end = time.monotonic() + limit_s
    while True:
        try:
            if condition():
                return True
            is_late = time.monotonic() > end
        except ApiUnavailable as error:
            if time.monotonic() > end:
                raise
            say(f"asking again: {error}")
            is_late = False
        if is_late:
            return False
        time.sleep(POLL_S)


@contextmanager
def told_as_exit() -> Iterator[None]:
    """Ends the process with the error's message."""
    try:
        yield
    except OperatorError as error:
        sys.exit(f"pagestream-operator: {error}")


def say(text: str) -> None:
    """Writes a line to the Job's log."""
    sys.stderr.write(f"pagestream-operator: {text}\n")
    sys.stderr.flush()
