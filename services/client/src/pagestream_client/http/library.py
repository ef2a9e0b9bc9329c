"""The HTTP library, an optional dependency that is imported when it is first used."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_httpx2() -> ModuleType:
    """Return the module `httpx2`, the HTTP library of the `openai` package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("httpx2")
    except ImportError as error:
        raise ImportError(
            "pagestream_client.http needs the package httpx2: install it with pip install 'pagestream-client[http]'"
        ) from error
