"""Which web pages may call the HTTP API from a browser."""

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from pagestream_gateway.settings import LOCALHOST

_LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
_READABLE = ["X-Request-Id", "X-Request-Seed", "X-Client-Request-Id", "X-Stream-Verified", "Retry-After"]
_KEPT_S = 600


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins call the API: https://app.example.com, LOCALHOST, or * for every page."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[each for each in origins if each != LOCALHOST],
            allow_origin_regex=_LOCAL_ORIGIN if LOCALHOST in origins else None,
            allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=_READABLE,
            max_age=_KEPT_S,
        )
