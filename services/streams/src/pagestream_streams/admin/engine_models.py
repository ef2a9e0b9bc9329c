"""Engines that change their models: what each serves and may serve, and what operators have asked of them.

One hash of the deployment, `<prefix>:engine-roster`. An engine's row lives as long as its process renews it; a row that
says that the engine is about to load another model is written only if no other such row came between the reading that
it was decided on and the writing (see `EngineModels.intend`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from pagestream_streams.connection.connection import Connection
from pagestream_streams.scripts import ROSTER

_ENGINE, _SERVED, _ORDER = "engine:", "served:", "order:"
_ROW_MS = 5000
"""Milliseconds that a row lives: five renewals. A row that lapses frees its model for others to load."""


class Verb(StrEnum):
    """What an operator asks of the engines of a model."""

    LOAD = "load"
    """One engine loads it, as if a request waited for it."""
    UNLOAD = "unload"
    """Engines that serve it, or keep its weights, free all of it."""
    SLEEP = "sleep"
    """Engines that serve it keep its weights in host memory, and free the rest."""


@dataclass(frozen=True)
class Order:
    """The last thing that an operator has asked for a model."""

    verb: Verb
    at_ms: int
    """By Redis' clock."""


@dataclass(frozen=True)
class EngineRow:
    """One engine process."""

    models: tuple[str, ...]
    """Names of the models that it may load, the one that it serves among them."""
    serving: str = ""
    """The model whose requests it claims, or that it is loading; "" while it has none."""
    is_loading: bool = False
    """Whether it claims nothing yet, since it ends one model or loads the next."""
    last: str = ""
    """The model that it had before an operator had it unloaded, or put to sleep; "" while it has one."""
    keeps: str = ""
    """The model, `last`, whose weights it has in host memory while it sleeps; "" for none."""
    since_ms: int = 0
    """When it began to serve `serving`, by Redis' clock; 0 while it loads."""
    active: int = 0
    """Requests that it runs."""
    owes: bool = False
    """Whether it keeps its model for requests that it has begun, whatever waits for others."""
    wakes: bool = True
    """Whether requests make it load a model while it has none; False: only an operator does."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Models that can't be loaded, with the reasons; it does not try again until an operator asks for it."""
    postponed: tuple[str, ...] = ()
    """Models that it could not load, and tries again later."""


@dataclass(frozen=True)
class EngineModelsView:
    """All engines that change their models, at one moment."""

    now_ms: int
    """By Redis' clock."""
    version: str
    """Changes with each intention."""
    engines: Mapping[str, EngineRow]
    """By the id of the process."""
    served_ms: Mapping[str, int]
    """By model: when an engine last served it."""
    orders: Mapping[str, Order]
    """By model."""

    @property
    def loadable(self) -> set[str]:
        """Names of the models that some engine serves or may load."""
        return {name for row in self.engines.values() for name in row.models if name not in row.failed}

    @property
    def awaited(self) -> set[str]:
        """Names of the models that engines serve or load, or would load for a request or an order.

        Not those whose engines all sleep until an operator wakes them.
        """
        ordered = {name for name, order in self.orders.items() if order.verb is Verb.LOAD}
        return {
            name
            for row in self.engines.values()
            for name in row.models
            if name not in row.failed and (row.serving or row.wakes or name in ordered)
        }

    def is_to_wake(self, model: str) -> bool:
        """Return whether an engine sleeps, or is about to, that had a model: it loads that once an operator asks."""
        rows = self.engines.values()
        return any(row.last == model and model not in row.failed and model not in row.postponed for row in rows)

    def reason(self, model: str) -> str | None:
        """Return why no engine can load a model, where all that list it have failed; None where one may."""
        rows = [row for row in self.engines.values() if model in row.models]
        if not rows or any(model not in row.failed for row in rows):
            return None
        return rows[0].failed[model]


class EngineModels:
    """A process' access to them. Every method raises Unavailable where Redis can't serve."""

    def __init__(self, connection: Connection) -> None:
        """Create it; nothing is sent yet."""
        self._connection = connection
        self._key = connection.keyspace.engine_models

    async def read(self) -> EngineModelsView:
        """Return them all."""
        return (await self._run("", "", ""))[1]

    async def renew(self, engine_id: str, row: EngineRow) -> EngineModelsView:
        """Write an engine's row, and return them all."""
        serving = "" if row.is_loading else row.serving
        return (await self._run(engine_id, _packed(row), "", serving))[1]

    async def intend(self, engine_id: str, row: EngineRow, version: str) -> bool:
        """Write the row of an engine that is about to load a model.

        Returns:
            Whether it is written: no other engine has intended anything since `version`.
        """
        is_written, view = await self._run(engine_id, _packed(row), version)
        return is_written or view.engines.get(engine_id) == row

    async def remove(self, engine_id: str) -> None:
        """Remove the row of an engine that ends."""
        await self._run(engine_id, "", "")

    async def order(self, model: str, verb: Verb) -> None:
        """Ask the engines for something. It replaces what was asked for the model before."""
        seconds, micros = await self._connection.execute("TIME")
        order = Order(verb, int(seconds) * 1000 + int(micros) // 1000)
        await self._connection.execute("HSET", self._key, _ORDER + model, _order_text(order))

    async def forget_order(self, model: str, order: Order) -> None:
        """Forget what was asked for a model: it is done. What was asked for since then stays."""
        await self._run("", "", "", settled=(_ORDER + model, _order_text(order)))

    async def _run(
        self, engine_id: str, row: str, version: str, serving: str = "", *, settled: tuple[str, str] = ("", "")
    ) -> tuple[bool, EngineModelsView]:
        arguments = engine_id, row, _ROW_MS, version, serving, *settled
        is_written, found, now_ms, pairs = await self._connection.run(ROSTER, self._key, *arguments)
        values = {name.decode(): value.decode() for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
        return bool(is_written), _view(int(now_ms), found, values)


def _packed(row: EngineRow) -> str:
    return json.dumps(asdict(row), separators=(",", ":"), sort_keys=True)


def _view(now_ms: int, version: bytes | int, values: Mapping[str, str]) -> EngineModelsView:
    return EngineModelsView(
        now_ms=now_ms,
        version=version.decode() if isinstance(version, bytes) else str(version),
        engines={each: _row(text.partition(" ")[2]) for each, text in _under(values, _ENGINE)},
        served_ms={model: int(text) for model, text in _under(values, _SERVED)},
        orders={
            model: order for model, text in _under(values, _ORDER) if (order := _order(json.loads(text))) is not None
        },
    )


def _under(values: Mapping[str, str], prefix: str) -> list[tuple[str, str]]:
    return sorted((name.removeprefix(prefix), value) for name, value in values.items() if name.startswith(prefix))


def _row(text: str) -> EngineRow:
    """Read a row, also of a later version: fields that this one doesn't know are left out."""
    found: dict[str, Any] = json.loads(text)
    known = {each.name for each in fields(EngineRow)} & found.keys()
    return EngineRow(
        **{
            **{name: found[name] for name in known},
            "models": tuple(found["models"]),
            "postponed": tuple(found.get("postponed", ())),
        }
    )


def _order_text(order: Order) -> str:
    return json.dumps({"verb": order.verb, "at_ms": order.at_ms})


def _order(found: Mapping[str, Any]) -> Order | None:
    """Read an order; None for a verb of a later version."""
    if found["verb"] not in set(Verb):
        return None
    return Order(Verb(found["verb"]), int(found["at_ms"]))
