"""Which models a server has."""

from __future__ import annotations

import httpx

from pagestream_cli.client.answer import error_message
from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.errors import RequestRejectedError, ServerNotFoundError, UsageError

LIMIT_S = 10.0


async def list_models(endpoint: Endpoint) -> dict[str, int | None]:
    """Served names, with the context length where the server tells it.

    Raises:
        ServerNotFoundError: nobody answers.
        RequestRejectedError: the server refuses, for want of an API key for example.
    """
    reason = ""
    for url in endpoint.urls:
        try:
            async with httpx.AsyncClient(headers=endpoint.headers, timeout=LIMIT_S) as http:
                answer = await http.get(f"{url}/v1/models")
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            continue
        if answer.status_code != httpx.codes.OK:
            raise RequestRejectedError(answer.status_code, error_message(answer.content))
        return {model["id"]: model.get("max_model_len") for model in answer.json()["data"]}
    raise ServerNotFoundError(
        f"no server answers at {', '.join(endpoint.urls)} ({reason})",
        hint="start one with `pagestream serve`, or check --url",
    )


async def choose_model(endpoint: Endpoint, asked: str | None) -> str:
    """The model that was asked for, else the only one.

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
