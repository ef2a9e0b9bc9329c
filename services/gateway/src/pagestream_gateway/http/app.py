"""The ASGI applications: all HTTP APIs together, and those of the administrators' and the metrics port."""

from fastapi import FastAPI
from pagestream_streams.tasks import Turns
from pydantic import BaseModel

from pagestream_gateway.admin import models as model_changes
from pagestream_gateway.admin import routes as administration
from pagestream_gateway.anthropic import answer as messages_answer
from pagestream_gateway.anthropic import body as messages_body
from pagestream_gateway.anthropic import routes as messages
from pagestream_gateway.batches import files
from pagestream_gateway.batches import routes as batches
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http import documents, health, page
from pagestream_gateway.http.callers import CorsHeaders, Front, allow_origins, own_hosts
from pagestream_gateway.openai import chat as chat_completions
from pagestream_gateway.openai import completions, embeddings, models, scoring, tokens
from pagestream_gateway.openai.errors import install_error_handlers
from pagestream_gateway.openai.responses import body as responses_body
from pagestream_gateway.openai.responses import routes as responses
from pagestream_gateway.streams import requests

_ABOUT = (
    "OpenAI's API, and Anthropic's messages, over a durable token stream. Each answer's X-Request-Id names its "
    "request. Each event carries a `stream_position`: give it as the `Last-Event-ID` of "
    "`GET /v1/requests/{request_id}/events` to continue the stream at any gateway."
)


_RESOURCES = (
    completions,
    chat_completions,
    responses,
    messages,
    embeddings,
    scoring,
    files,
    batches,
    tokens,
    models,
    requests,
    model_changes,
    administration,
    health,
)
_ANSWERS = {operation: answers for resource in _RESOURCES for operation, answers in resource.ANSWERS.items()}


def build_app(gateway: Gateway) -> FastAPI:
    """Return the application of the HTTP port."""
    app = _app_for_callers(gateway, CorsHeaders(gateway.settings.gateway.origins), gateway.turns)
    generations = (completions, chat_completions, responses, messages, embeddings, scoring)
    for resource in (*generations, models, requests, files, batches, tokens):
        app.include_router(resource.router(gateway))
    app.include_router(health.router(gateway, is_for_callers=True))
    bodies: list[type[BaseModel]] = [
        completions.CompletionBody,
        chat_completions.ChatBody,
        responses_body.ResponseBody,
        messages_body.MessageBody,
        messages_body.CountBody,
        batches.BatchBody,
        tokens.TokenizeBody,
        tokens.DetokenizeBody,
    ]
    settings = gateway.settings.gateway
    has_administrators = settings.admin_keys is not None
    if settings.allow_runtime_lora or has_administrators:
        app.include_router(model_changes.adapters_router(gateway))
        bodies += [model_changes.LoadBody, model_changes.UnloadBody]
    if settings.allow_model_changes or has_administrators:
        app.include_router(model_changes.router(gateway))
        bodies += [model_changes.ModelBody]
    if has_administrators and settings.admin_port is None:
        app.include_router(administration.router(gateway))
    if settings.page:
        app.include_router(page.router(gateway))
    allow_origins(app, settings.origins)
    vectors = (
        embeddings.EmbeddingBody,
        scoring.ScoreBody,
        scoring.RerankBody,
        scoring.ClassificationBody,
    )
    documents.install(app, _ANSWERS, [*bodies, *vectors], asks_for_credentials=settings.asks_for_credentials)
    return app


def build_admin_app(gateway: Gateway) -> FastAPI:
    """Return the application of the administrators' port."""
    app = _app_for_callers(gateway)
    app.include_router(administration.router(gateway))
    documents.install(app, _ANSWERS, [], asks_for_credentials=True)
    return app


def build_metrics_app(gateway: Gateway) -> FastAPI:
    """Return the application of the metrics port, with what probes and scrapers read."""
    app = _bare_app(gateway, gateway.settings.gateway.metrics_address, asks_for_credentials=False)
    app.include_router(health.router(gateway, is_for_callers=False))
    return app


def _app_for_callers(gateway: Gateway, cors: CorsHeaders | None = None, turns: Turns | None = None) -> FastAPI:
    settings = gateway.settings.gateway
    return _bare_app(gateway, settings.host, settings.asks_for_credentials, cors, turns)


def _bare_app(
    gateway: Gateway,
    address: str,
    asks_for_credentials: bool,
    cors: CorsHeaders | None = None,
    turns: Turns | None = None,
) -> FastAPI:
    app = FastAPI(
        title="Pagestream",
        version="1",
        description=_ABOUT,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # `calls.py` has them
    )
    settings = gateway.settings.gateway
    hosts = own_hosts(settings, address, asks_for_credentials=asks_for_credentials)
    app.add_middleware(Front, ignores_unknown=settings.ignores_unknown_fields, hosts=hosts, cors=cors, turns=turns)
    install_error_handlers(app, {messages.PATH: messages_answer.respond})
    return app
