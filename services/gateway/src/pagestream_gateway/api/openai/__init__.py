"""The OpenAI HTTP API."""

from pagestream_gateway.api.openai.app import build_app, build_metrics_app

__all__ = ["build_app", "build_metrics_app"]
