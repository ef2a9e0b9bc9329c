"""Attention of one layer over the paged cache, as model code calls it."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention import Angles, AttentionSpec, Backend, HeadNorm, StepContext


class PagedAttention:
    """Writes a layer's keys and values to the cache, and attends.

    Heads of query and key, or of value, may be smaller than the cache's: they are filled up with zeros, which change no
    score and no result.
    """

    __slots__ = ("_backend", "_group", "layer", "spec")

    def __init__(self, backend: Backend, layer: int, spec: AttentionSpec) -> None:
        """Raise ConfigError for a layer that the backend can't run.

        Args:
            backend: whose cache and attention are used.
            layer: index of the layer in the cache.
        """
        backend.attention.check(spec)
        self._backend = backend
        self._group = backend.store.group_of[layer]
        self.layer = layer
        self.spec = spec

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: StepContext,
        angles: Angles | None = None,
        *,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        """Attend to everything that the query tokens see, these tokens included.

        Args:
            query: (tokens, num_heads, head size), may be overwritten.
            key: (tokens, num_kv_heads, head size of the query), may be overwritten.
            value: (tokens, num_kv_heads, its own head size).
            angles: by which query and key are to be rotated; None where they are already, or never.
            norm: of query and key, before they are rotated.

        Returns:
            (tokens, num_heads * head size of the value), in the packed order.
        """
        spec, value_dim = self.spec, value.shape[2]
        store, operators = self._backend.store, self._backend.operators
        slots = context.slots[self._group]
        is_whole = key.shape[2] == spec.head_dim
        if angles is not None and is_whole and store.rotates(angles.rotation, spec.head_dim, norm):
            if value_dim != spec.head_dim:
                value = _filled(value, spec.head_dim)
            query = store.rotate_and_write(self.layer, query, key, value, slots=slots, angles=angles, norm=norm)
        else:
            if norm is not None:
                query = operators.rms_norm(query, norm.query_weight, norm.eps)
                key = operators.rms_norm(key, norm.key_weight, norm.eps)
            if angles is not None:
                query, key = operators.rotate(query, key, angles)
            query, key = _filled(query, spec.head_dim), _filled(key, spec.head_dim)
            store.write(self.layer, key, _filled(value, spec.head_dim), slots)
        output = self._backend.attention.attend(self.layer, query, spec, context.metadata[self._group])
        if value_dim == spec.head_dim:
            return output
        return output.view(len(output), -1, spec.head_dim)[..., :value_dim].flatten(1)


def _filled(x: Tensor, head_dim: int) -> Tensor:
    """(tokens, heads, head size) -> (tokens, heads, head_dim)."""
    missing = head_dim - x.shape[2]
    return F.pad(x, (0, missing)) if missing else x
