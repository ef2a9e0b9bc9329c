"""A model's attention, found out by running it: heads, sizes, scale, window, soft cap and sinks of each layer.

Short runs in float32 also show whether tokens meet in attention alone, by three means of which each suffices: their
operations (`TokenMixing`), the way of NaN through them, and results beside others, which are those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pagestream_engine.attention import AttentionSpec
from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.models.general.interface import (
    ATTENTION,
    PROBED_ATTENTION,
    AttentionCall,
    MaskFunction,
    call_packed,
    mask_maker,
    set_answerer,
    set_implementation,
)
from pagestream_engine.models.general.masks import MaskRecorder
from pagestream_engine.models.general.mixing import TokenMixing, count_of_tokens

_LENGTH, _HEAD = 9, 4
"""Tokens of the sequence that the probe looks at, and of its beginning, which reaches the rest through keys and values
alone: the engine computes a sequence over several steps."""
_NEIGHBOUR = 7
"""Most tokens of a sequence beside it."""
_LARGEST_DIFFERENCE, _LARGEST_OF_HALVES = 1e-3, 5e-2
"""Of a token's results beside others and alone, relative to their norm: far above what another order of sums makes of
float32, and of operations that a device has for 16 bits alone. Finds what counts positions itself; tokens that meet
outside attention are found by structure."""
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
    cached: Sequence[tuple[Tensor, Tensor]] = ()
    """Keys and values of each call of an earlier run, whose first _HEAD the sequence at index 1 reads in place of its
    own."""
    specs: list[AttentionSpec] = field(default_factory=list)
    """Of each call, in the order of calls."""
    stored: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values of each call."""
    masks: MaskRecorder = field(init=False)
    mixing: TokenMixing | None = None
    """What watches the run; None: a run in the model's dtype."""

    def __post_init__(self) -> None:
        self.masks = MaskRecorder(self.max_model_len)

    def attend(self, call: AttentionCall) -> Tensor:
        """As `Answerer`."""
        with nullcontext() if self.mixing is None else self.mixing.paused():
            spec = self._spec(call)
            self.specs.append(spec)
            self.stored.append((call.key, call.value))
            parts = [list(torch.split(x, list(self.lengths))) for x in (call.query, call.key, call.value)]
            if self.cached:
                for own, earlier in zip(parts[1:], self.cached[len(self.specs) - 1], strict=True):
                    own[1] = torch.cat((earlier[:_HEAD].to(own[1]), own[1][_HEAD:]))
            return torch.cat([dense_attention(spec, *sequence) for sequence in zip(*parts, strict=True)])

    def make_mask(self, function: MaskFunction, tokens: int) -> Tensor:
        """As `MaskMaker`."""
        with nullcontext() if self.mixing is None else self.mixing.paused():
            return self.masks.make(function, tokens)

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
    """Find out how each layer attends, and that tokens meet in attention alone.

    Args:
        model: a causal LM of `transformers`, loaded, with linears of its own.
        max_model_len: longest sequence, in tokens.

    Raises:
        UnsupportedModel: the model can't run on the paged cache.
    """
    count = count_of_tokens(model)
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, vocab_size, (length,), generator=draw) for length in _lengths(count)]
    second = sequences[1]
    alone = Probe(max_model_len, [_LENGTH])
    expected = _run(model, alone, [second], PROBED_ATTENTION, num_tokens=0)
    if not alone.specs:
        raise UnsupportedModel("attention: given a model that does not call the attention interface, expected calls")
    has_halves = alone.mixing is not None and alone.mixing.kept_halves
    largest = _LARGEST_OF_HALVES if has_halves else _LARGEST_DIFFERENCE
    # Neighbours that are all alike crowd what has a capacity.
    same = [second if index == 1 else torch.full_like(each, 1) for index, each in enumerate(sequences)]
    _compare(_beside(model, alone, same, count), expected, largest)
    poisoned = torch.ones(count, dtype=torch.bool)
    poisoned[len(sequences[0]) + _HEAD : len(sequences[0]) + _LENGTH] = False
    _compare(_beside(model, alone, sequences, count, poisoned), expected[_HEAD:], largest)
    return alone.specs


def check_runs(model: nn.Module, specs: Sequence[AttentionSpec], max_model_len: int, vocab_size: int) -> None:
    """Run a model once, in its own dtype, as steps will.

    Args:
        model: a causal LM of `transformers`, with the engine's linears.
        specs: what `probe` has found.

    Raises:
        UnsupportedModel: the modelling code does not run, or calls attention another number of times.
    """
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, vocab_size, (length,), generator=draw) for length in (_NEIGHBOUR, _LENGTH)]
    run = Probe(max_model_len, [_NEIGHBOUR, _LENGTH], known=specs)
    _run(model, run, sequences, ATTENTION)
    _check_calls(run, len(specs))


def _lengths(count: int) -> list[int]:
    """Return the lengths of packed sequences, so many tokens in all; the second is the one that is looked at."""
    lengths = [_NEIGHBOUR, _LENGTH]
    while sum(lengths) < count:
        lengths.append(min(_NEIGHBOUR, count - sum(lengths)))
    return lengths


def _beside(
    model: nn.Module, alone: Probe, sequences: list[Tensor], count: int, poisoned: Tensor | None = None
) -> Tensor:
    """Run the second sequence beside others. Return its tokens' results, or those of tokens that aren't poisoned."""
    cached = alone.stored if poisoned is not None else ()
    beside = Probe(alone.max_model_len, [len(each) for each in sequences], known=alone.specs, cached=cached)
    results = _run(model, beside, sequences, ATTENTION, num_tokens=count, poisoned=poisoned)
    _check_calls(beside, len(alone.specs))
    of_second = slice(len(sequences[0]), len(sequences[0]) + _LENGTH)
    if poisoned is None:
        return results[of_second]
    if not bool(results[poisoned].isnan().all()):
        raise UnsupportedModel(
            "layers: given some that hide NaN, by whose way tokens that meet outside attention are found, expected "
            "arithmetic that passes it on"
        )
    return results[of_second][_HEAD:]


def _check_calls(run: Probe, count: int) -> None:
    if len(run.specs) != count:
        raise UnsupportedModel("attention: given another number of calls in each run, expected one number")


def _compare(results: Tensor, expected: Tensor, largest: float) -> None:
    if bool(results.isnan().any()) and not bool(expected.isnan().any()):
        raise UnsupportedModel(
            "layers: given some in which tokens meet outside attention, such as a convolution or a recurrent state, "
            "expected attention alone"
        )
    difference = float(((results - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    if not difference <= largest:
        raise UnsupportedModel(
            "layers: given some that mix tokens outside attention, such as a convolution or a recurrent state, or a "
            f"model that counts positions itself, expected attention alone (results differ by {difference:.2g})"
        )


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


def _run(
    model: nn.Module,
    probe: Probe,
    sequences: list[Tensor],
    implementation: str,
    *,
    num_tokens: int | None = None,
    poisoned: Tensor | None = None,
) -> Tensor:
    """(tokens, vocab_size) float32: logits of packed sequences. With `num_tokens`, as `TokenMixing` runs them."""
    device = next(model.parameters()).device
    token_ids, positions = torch.cat(sequences).to(device), positions_of(sequences).to(device)
    if num_tokens is not None:
        where = None if poisoned is None else poisoned.to(device)
        probe.mixing = TokenMixing(num_tokens, token_ids, where)
    set_implementation(model, implementation)
    set_answerer(model, probe.attend)
    token = mask_maker.set(probe.make_mask)
    try:
        with nullcontext() if probe.mixing is None else probe.mixing:
            logits = call_packed(model, token_ids, positions)
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
