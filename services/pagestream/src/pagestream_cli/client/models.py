"""Which models a server has."""

from __future__ import annotations

from pagestream_client import PagestreamError, Reconnection, Unavailable
from pagestream_client.http import AsyncHttpClient

from pagestream_cli.client.answer import cli_error
from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.errors import RequestRejectedError, ServerNotFoundError, UsageError

ONCE = Reconnection(limit_s=0.0, first_contact_s=0.0)
"""Call each gateway at most once: a person waits."""


async def list_models(endpoint: Endpoint) -> dict[str, int | None]:
    """Return served names with their context length in tokens; None where the server does not say.

    Raises:
        ServerNotFoundError: no gateway answers.
        RequestRejectedError: the server refuses, for example without an API key.
    """
    try:
        async with AsyncHttpClient(
            endpoint.urls, api_key=endpoint.api_key, reconnection=ONCE, transport=endpoint.transport
        ) as client:
            return {model.name: model.max_model_len for model in await client.list_models()}
    except Unavailable as error:
        if error.http_status is not None:
            raise RequestRejectedError(error.http_status, str(error)) from error
        raise ServerNotFoundError(
            f"no server answers: {error}", hint="start one with `pagestream serve`, or check --url"
        ) from error
    except PagestreamError as error:
        raise cli_error(error) from error


async def choose_model(endpoint: Endpoint, asked: str | None) -> str:
    """Return the model that was asked for, else the only one.

    Raises:
        UsageError: none was asked for and there is not exactly one.
    """
    if asked is not None:
        return asked
    models = sorted(await list_models(endpoint))
    if len(models) == 1:
        return models[0]
    raise UsageError(
        f"the server has {len(models)} models: {', '.join(models) or 'none yet'}", hint="name one with --model"
    )
