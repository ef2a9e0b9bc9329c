"""Whether a pool's models are known to gateways. The first engine of a model publishes its model card, and those of
all models of its list, before it is ready; the operator, which keeps out of Redis, sees that an engine became ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagestream_operator.api import EnginePool
from pagestream_operator.children.manifest import digest
from pagestream_operator.fields import mapping, mappings, nested, text
from pagestream_operator.pool.view import PoolView

_SOME = "some"
"""No hash of a card, and so different from each."""


def card_digest(pool: EnginePool) -> str:
    """Hash of what model cards come from: the models and the engine's options."""
    models = [each.to_object() for each in pool.spec.all_models]
    return digest([*models, pool.spec.engine.to_object()])


def published_card(pool: EnginePool, view: PoolView) -> str | None:
    """The hash of the card that was published last, by what is known now: that of the spec, once an engine of it is
    ready and none of an earlier one runs. `_SOME` where an engine is ready and it isn't known of which spec: what it
    has published must be removed all the same when the pool is deleted.
    """
    if not view.ready:
        return pool.status.published_card
    is_newest = view.is_observed and view.updated >= view.spec_replicas
    return card_digest(pool) if is_newest else pool.status.published_card or _SOME


def has_published(pool: EnginePool, view: PoolView) -> bool:
    """Whether an engine of the pool has ever published its models, as far as the operator has seen."""
    return pool.status.published_card is not None or bool(view.ready)


def awaits_card(pool: EnginePool) -> bool:
    """Whether the pool must have an engine that publishes its model: at zero engines no request could name it."""
    spec = pool.spec
    return spec.min_replicas == 0 and spec.replicas is None and pool.status.published_card != card_digest(pool)


def served_names(body: Mapping[str, Any]) -> list[str]:
    """The names of a pool's models, read from its object, whose spec may be invalid otherwise."""
    models = (mapping(nested(body, "spec", "model")), *mappings(nested(body, "spec", "models")))
    return [name for model in models if (name := text(model.get("servedName")))]
