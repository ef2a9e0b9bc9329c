"""Keep the rotations of `transformers`' modelling code from following the longest sequence of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.layers.rope import RopeContext, rope_context

_BY_LENGTH = ("dynamic", "longrope")
"""Scalings whose frequencies `transformers` chooses by the largest position of a call."""


def shortest_context(config: Any, max_position_embeddings: int) -> RopeContext:
    """Return the context that all rotations of a configuration have."""
    found = [RopeContext(max_position_embeddings, max_position_embeddings)]
    for scaling in _scalings(config).values():
        if scaling.get("rope_type") in _BY_LENGTH:
            found.append(rope_context(scaling["rope_type"], scaling, max_position_embeddings))
    return RopeContext(min(one.num_tokens for one in found), max(one.extended for one in found))


def fix_rotations(model: nn.Module, max_model_len: int) -> None:
    """Give every rotation the frequencies of a sequence of `max_model_len` tokens, whatever the batch.

    Raises:
        UnsupportedModel: modelling code chooses them in a way of its own.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer_type = kinds if isinstance(kinds, Mapping) else {None: kinds}
        for layer_type, kind in by_layer_type.items():
            if kind in _BY_LENGTH and hasattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"):
                _fix(module, kind, layer_type, max_model_len)


def _fix(module: Any, kind: str, layer_type: str | None, max_model_len: int) -> None:
    scaling = _scalings(module.config)[layer_type]
    context = rope_context(kind, scaling, module.config.max_position_embeddings)
    if max_model_len <= context.num_tokens:
        return  # no call's positions reach the change
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    current = getattr(module, prefix + "inv_freq")
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
        module.config, current.device, seq_len=max_model_len, layer_type=layer_type
    )
    for name in ("inv_freq", "original_inv_freq"):
        getattr(module, prefix + name).copy_(frequencies)
    setattr(module, prefix + "long_inv_freq", frequencies)
    setattr(module, prefix + "max_seq_len_cached", max_model_len)
    module.original_max_seq_len = max_model_len
    positions = torch.tensor([[1, max_model_len - 1]], device=current.device)
    if not torch.equal(_cosines(module, positions[:, :1], layer_type), _cosines(module, positions, layer_type)[:, :1]):
        raise UnsupportedModel(
            f"max_model_len: given {max_model_len}, expected at most {context.num_tokens}: beyond it the modelling "
            f"code rotates all tokens of a batch by its longest sequence ({kind})"
        )


def _cosines(module: nn.Module, positions: Tensor, layer_type: str | None) -> Tensor:
    options = {} if layer_type is None else {"layer_type": layer_type}
    cosines: Tensor = module(torch.zeros(1, device=positions.device), positions, **options)[0]
    return cosines


def _scalings(config: Any) -> dict[str | None, Mapping[str, Any]]:
    """Parameters of each rotation by layer type; None where all layers have one."""
    given = getattr(config, "rope_parameters", None) or {}
    nested: dict[str | None, Mapping[str, Any]] = {key: x for key, x in given.items() if isinstance(x, Mapping)}
    return nested or {None: given}
