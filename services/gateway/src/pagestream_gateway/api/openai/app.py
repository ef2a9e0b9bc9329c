"""The ASGI application."""

from fastapi import FastAPI

from pagestream_gateway.api.openai.caller import Door
from pagestream_gateway.api.openai.documents import install_documents
from pagestream_gateway.api.openai.errors import install_handlers
from pagestream_gateway.api.openai.generation_routes import generation_router
from pagestream_gateway.api.openai.health_routes import health_router
from pagestream_gateway.api.openai.request_routes import request_router
from pagestream_gateway.core.auth import KeyRing
from pagestream_gateway.core.frontend import Frontend

_ABOUT = (
    "OpenAI's API over a durable token stream. Each answer's X-Request-Id names its request; each event's id is "
    "a place from which GET /v1/requests/<request id>/events goes on, on any gateway."
)


def build_app(frontend: Frontend, keys: KeyRing) -> FastAPI:
    """The whole HTTP API."""
    app = _bare_app()
    door = Door(frontend, keys)
    app.include_router(generation_router(frontend, door))
    app.include_router(request_router(frontend, door))
    app.include_router(health_router(frontend))
    install_documents(app)
    return app


def build_metrics_app(frontend: Frontend) -> FastAPI:
    """Only what probes and scrapers read, for a port of its own."""
    app = _bare_app()
    app.include_router(health_router(frontend))
    return app


def _bare_app() -> FastAPI:
    app = FastAPI(
        title="Pagestream",
        version="1",
        description=_ABOUT,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_handlers(app)
    return app
