"""The key that a client shows to a gateway."""

from __future__ import annotations

import os

API_KEY_VARIABLE = "PAGESTREAM_CLIENT__API_KEY"


def api_key(given: str | None = None) -> str | None:
    """The key that was typed, else the environment's; None: no key is shown."""
    return given or os.environ.get(API_KEY_VARIABLE) or None
