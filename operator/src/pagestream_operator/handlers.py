"""What kopf calls: settings at its start, access to the API server, and each object that a list or a watch shows.

The handlers write nothing and decide nothing: they pass objects on to the `KopfRun` in kopf's memo, on every replica.
`pool/reconciler.py` acts on what the watcher has stored. README.md names the parts of kopf that are not used, with
their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import kopf

from pagestream_operator.errors import SettingsError
from pagestream_operator.kube.client import find_access, open_session
from pagestream_operator.kube.kinds import WATCHED, Kind

REGISTRY = kopf.OperatorRegistry()

_RETRY_S = (0.5, 1.0, 2.0, 2.0, 2.0, 5.0, 5.0, 5.0)
"""Pauses between tries of a list or watch. Short, since nothing is seen meanwhile. After the last one kopf gives up,
and the watcher starts it anew."""
_INACTIVE_AFTER = 1.5
"""A watch of which nothing has come for so many times the length of a watch is cut off: its end would have come."""
_DEPLETE_S = 0.5
"""How long kopf may take for events that are still queued when it stops."""

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def _for_each_watched_kind(decorator: Callable[..., Callable[[Any], Any]]) -> Callable[[_Handler], _Handler]:
    """Register a handler for all watched kinds, which it gets as `param`."""

    def register(handler: _Handler) -> _Handler:
        for kind in WATCHED:
            identity = f"{handler.__name__}-{kind.plural}"
            decorator(kind.group, kind.version, kind.plural, id=identity, param=kind, registry=REGISTRY)(handler)
        return handler

    return register


@kopf.on.startup(registry=REGISTRY)
async def configure(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Turn off what writes to the cluster, and shorten what delays a watch."""
    watch_s = memo.run.watch_s
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.error_backoffs = _RETRY_S
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = max(1, round(watch_s))  # an integer: the API server takes nothing else
    settings.watching.inactivity_timeout = _INACTIVE_AFTER * watch_s
    settings.queueing.idle_timeout = 0.5
    settings.queueing.exit_timeout = _DEPLETE_S
    settings.process.ultimate_exiting_timeout = None
    for kind in WATCHED:
        if kind.label_selector is not None:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.label_selector


@kopf.on.login(registry=REGISTRY)
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession | None:
    """Authenticate as `KubeClient` does, by a session that reports each answer."""
    try:
        opened = open_session(find_access(), memo.run.note_answer)
    except (SettingsError, OSError, ValueError) as error:
        memo.run.give_up(f"no access to the API server: {error}")
        return None
    memo.sessions.append(opened.aiohttp_session)
    return opened


@kopf.on.cleanup(registry=REGISTRY)
async def note_end(memo: kopf.Memo, **_: Any) -> None:
    """Note that kopf ends, whether it was asked to or not."""
    memo.run.note_end()


@_for_each_watched_kind(kopf.index)
async def store_object(body: Mapping[str, Any], param: Kind, memo: kopf.Memo, **_: Any) -> None:
    """Store an object as it is now. An index, since kopf holds all events back until everything listed was indexed."""
    memo.run.store_object(param, dict(body))


@_for_each_watched_kind(kopf.on.event)
async def observe_event(event: Mapping[str, Any], param: Kind, memo: kopf.Memo, **_: Any) -> None:
    """Note a listed object, a change or a deletion."""
    memo.run.observe_event(param, event["type"], event["object"])
