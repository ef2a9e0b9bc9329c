"""A gateway, a second one and an engine for each file of tests."""

from support.clients.gateway_fixtures import (
    another,
    card,
    engine,
    gateway,
    http,
    other_gateway,
    redis_url,
    settings,
    shared_engine,
    shared_gateway,
    shared_http,
)

__all__ = [
    "another",
    "card",
    "engine",
    "gateway",
    "http",
    "other_gateway",
    "redis_url",
    "settings",
    "shared_engine",
    "shared_gateway",
    "shared_http",
]
