"""Errors of the client in the words of the command line."""

from __future__ import annotations

from pagestream_client import GenerationFailed, PagestreamError, Unavailable

from pagestream_cli.errors import CliError, RequestRejectedError, StreamLostError


def cli_error(error: PagestreamError) -> CliError:
    """Return an error of the client as one of the command line."""
    if isinstance(error, Unavailable):
        hint = "does a server run there?"
        if error.position is not None:
            hint = f"the answer may still be there: GET /v1/requests/{error.position.request_id}/events"
        return StreamLostError(str(error), hint=hint)
    text = f"{error.code}: {error}" if isinstance(error, GenerationFailed) else str(error)
    return RequestRejectedError(error.http_status or 200, text)
