"""The attention function that `transformers`' modelling code calls.

It is registered once in a process; each model's modules carry the function that answers for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

ATTENTION = "pagestream"
"""Name of the attention implementation. No masks are made for it: who sees what is the paged cache's business."""
PROBED_ATTENTION = "pagestream_probe"
"""As ATTENTION, with masks, which the probe reads."""
MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""Batch, head, query and key index -> whether the query sees the key."""
MaskMaker = Callable[[MaskFunction, int], Tensor]
"""A mask function and the number of tokens -> the mask that the layers get."""
mask_maker: ContextVar[MaskMaker] = ContextVar("mask_maker")
"""What makes the masks while a model is probed."""
_ANSWERER = "pagestream_answerer"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What modelling code asks for."""

    module: nn.Module
    """That asks."""
    query: Tensor
    """(tokens, num_heads, head size)."""
    key: Tensor
    """(tokens, num_kv_heads, head size)."""
    value: Tensor
    """(tokens, num_kv_heads, its own head size)."""
    mask: Tensor | None
    """As the modelling code has made it."""
    options: Mapping[str, Any]
    """Further keyword arguments."""


Answerer = Callable[[AttentionCall], Tensor]
"""Attends once: returns (tokens, num_heads * head size of the value)."""


def register() -> None:
    """Make the implementations known to `transformers`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in (ATTENTION, PROBED_ATTENTION):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(PROBED_ATTENTION, _make_mask)


def set_answerer(model: nn.Module, answerer: Answerer) -> None:
    """Let a function answer the calls of all modules of a model."""
    for module in model.modules():
        module.__dict__[_ANSWERER] = answerer


def set_implementation(model: nn.Module, name: str) -> None:
    """Choose the attention implementation of all modules of a model."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name


def call_packed(model: nn.Module, token_ids: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
    """Run a causal LM on packed tokens, without its own cache.

    Args:
        model: of `transformers`.
        token_ids: (tokens,) int64.
        positions: (tokens,) int64: place of each token in its sequence.
        rows: (rows,) int64: the tokens whose logits are wanted; None: all.

    Returns:
        (rows, vocab_size).
    """
    keeps = rows is not None and "logits_to_keep" in inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": rows} if keeps else {}
    output = model(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **options
    )
    logits: Tensor = output.logits[0]
    return logits if rows is None or keeps else logits[rows]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    answerer: Answerer = module.__dict__[_ANSWERER]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    output = answerer(AttentionCall(module, query, key, value, attention_mask, options))
    return output.view(1, len(query), query.shape[1], -1), None


def _make_mask(*, q_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
    return mask_maker.get()(mask_function, q_length)
