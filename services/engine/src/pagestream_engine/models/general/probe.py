"""A model's attention, found out by running it: heads, sizes, scale, window, soft cap and sinks of each layer.

Two short runs also show whether tokens of different sequences meet in attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pagestream_engine.attention import AttentionSpec
from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.models.general.interface import (
    ATTENTION,
    PROBED_ATTENTION,
    AttentionCall,
    call_packed,
    mask_maker,
    set_answerer,
    set_implementation,
)
from pagestream_engine.models.general.masks import MaskRecorder

_FIRST, _SECOND = 7, 9
"""Tokens of the two sequences of the probe."""
_LARGEST_DIFFERENCE = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.2}
"""Of the second sequence's results beside the first and alone, relative to their norm: far above rounding, far below
what a convolution or a recurrent state over both makes of it."""
_SCORE_OPTIONS = ("position_bias", "score_mod", "block_mask", "head_mask", "alibi")
"""Arguments that change scores, and that the paged cache does not have."""


@dataclass
class Probe:
    """Answers attention calls of one sequence, or of packed ones, densely, and notes what each call asks for."""

    max_model_len: int
    lengths: Sequence[int]
    """Tokens of each packed sequence."""
    known: Sequence[AttentionSpec] = ()
    """Of an earlier run: where there are some, windows come from them."""
    specs: list[AttentionSpec] = field(default_factory=list)
    """Of each call, in the order of calls."""
    masks: MaskRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.masks = MaskRecorder(self.max_model_len)

    def attend(self, call: AttentionCall) -> Tensor:
        """As `Answerer`."""
        spec = self._spec(call)
        self.specs.append(spec)
        parts = [torch.split(x, list(self.lengths)) for x in (call.query, call.key, call.value)]
        return torch.cat([dense_attention(spec, *sequence) for sequence in zip(*parts, strict=True)])

    def _spec(self, call: AttentionCall) -> AttentionSpec:
        query, key, value, options = call.query, call.key, call.value, call.options
        tokens = sum(self.lengths)
        if len(query) != tokens or len(key) != tokens:
            raise UnsupportedModel(f"attention: given {len(key)} keys for {tokens} tokens, expected one for each")
        is_causal = options.get("is_causal") is not False and getattr(call.module, "is_causal", True) is not False
        if call.mask is None and not is_causal:
            raise UnsupportedModel("attention: given one that is not causal, expected causal attention")
        for name in _SCORE_OPTIONS:
            if options.get(name) is not None:
                raise UnsupportedModel(f"attention: given {name}, expected scores of query and key alone")
        if self.known:
            window = self.known[len(self.specs) % len(self.known)].window
        else:
            window = self.masks.window(call.mask, options.get("sliding_window"), _configured_window(call.module))
        scale, sinks = options.get("scaling"), options.get("s_aux")
        return AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=max(query.shape[2], value.shape[2]),
            scale=query.shape[2] ** -0.5 if scale is None else float(scale),
            window=window,
            soft_cap=options.get("softcap"),
            sinks=None if sinks is None else sinks.detach().float().flatten(),
        )


def probe(model: nn.Module, max_model_len: int, vocab_size: int) -> list[AttentionSpec]:
    """Find out how each layer attends.

    Args:
        model: a causal LM of `transformers`, loaded.
        max_model_len: longest sequence, in tokens.

    Raises:
        UnsupportedModel: the model can't run on the paged cache.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(0, vocab_size, (count,), generator=generator) for count in (_FIRST, _SECOND))
    alone = Probe(max_model_len, [_SECOND])
    expected = _run(model, alone, [second], PROBED_ATTENTION)
    if not alone.specs:
        raise UnsupportedModel("attention: given a model that does not call the attention interface, expected calls")
    beside = Probe(max_model_len, [_FIRST, _SECOND], known=alone.specs)
    results = _run(model, beside, [first, second], ATTENTION)[_FIRST:]
    if len(beside.specs) != len(alone.specs):
        raise UnsupportedModel("attention: given another number of calls in each run, expected one number")
    difference = float((results - expected).norm() / expected.norm())
    if not difference <= _LARGEST_DIFFERENCE[next(model.parameters()).dtype]:
        raise UnsupportedModel(
            "layers: given some that mix tokens outside attention, such as a convolution or a recurrent state, or a "
            f"model that counts positions itself, expected attention alone (results differ by {difference:.2g})"
        )
    return alone.specs


def _configured_window(module: nn.Module) -> int | None:
    """Window by which `transformers`' own cache would drop keys of every layer."""
    config = getattr(module, "config", None)
    if getattr(config, "layer_types", None) is not None:
        return None
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) else None


def dense_attention(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend within one sequence that starts here; shapes as in an `AttentionCall`."""
    group = spec.num_heads // spec.num_kv_heads
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * spec.scale
    if spec.soft_cap is not None:
        scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
    places = torch.arange(len(query), device=query.device)
    hidden = places[None] > places[:, None]
    if spec.window is not None:
        hidden |= places[None] <= places[:, None] - spec.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks[:, None, None].expand(-1, len(query), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(query)]
    return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype).flatten(1)


def _run(model: nn.Module, probe: Probe, sequences: list[Tensor], implementation: str) -> Tensor:
    """(tokens, vocab_size) float32: logits of packed sequences."""
    device = next(model.parameters()).device
    set_implementation(model, implementation)
    set_answerer(model, probe.attend)
    token = mask_maker.set(probe.masks.make)
    try:
        logits = call_packed(model, torch.cat(sequences).to(device), positions_of(sequences).to(device))
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"modelling code: given an error on packed tokens without a cache, expected logits: {_one_line(error)}"
        ) from error
    finally:
        mask_maker.reset(token)
    return logits.float()


def positions_of(sequences: list[Tensor]) -> Tensor:
    """(tokens,) int64: place of each packed token in its sequence."""
    return torch.cat([torch.arange(len(sequence)) for sequence in sequences])


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"
