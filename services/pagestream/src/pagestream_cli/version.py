"""The version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import version


def installed_version() -> str:
    """Version of the distribution `pagestream`."""
    return version("pagestream")
