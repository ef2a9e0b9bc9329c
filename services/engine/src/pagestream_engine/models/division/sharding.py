"""Divide a decoder among ranks: which rows or columns of its matrices each rank reads, and what they exchange.

Query, key and value projections, gates and up projections are divided by their rows (heads, channels), output and down
projections by their columns; the ranks' products of the latter are added up, twice a layer. Each expert of a mixture is
divided in the same way, and the mixture's result is added up once. The head is divided by tokens of the vocabulary. The
embedding, norms and routers are on every rank. With fewer KV heads than ranks, several ranks hold the same one.

What is quantised while it is loaded has the scales of one process: those of an output belong to its whole row, of which
a rank that divides columns reads all and keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from pagestream_engine.errors import ConfigError, UnsupportedOption
from pagestream_engine.layers.linear import Linear
from pagestream_engine.models.decoder import DecoderConfig
from pagestream_engine.models.weights import (
    EXPERT,
    LinearWeight,
    Parameters,
    Part,
    TensorWeight,
    TiedWeight,
    Weight,
    WeightMap,
)
from pagestream_engine.parallel.ranks import Ranks

OPTION = "tensor_parallel_size"
_WHOLE = ("router",)
"""Linears that every rank has."""


def shard_config(config: DecoderConfig, rank: int, size: int) -> DecoderConfig:
    """Return the shape of one rank's part, with its heads' slopes. Scale, vocabulary and hidden size are the model's.

    Raises:
        ConfigError: norms, heads or channels can't be divided among so many ranks.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    _require_divisible("num_attention_heads", heads, size)
    if kv_heads % size and size % kv_heads:
        raise ConfigError(OPTION, size, f"a divisor or a multiple of num_key_value_heads, {kv_heads}")
    if not all(layer.is_sparse for layer in config.layers):
        _require_divisible("intermediate_size", config.intermediate_size, size)
    if config.qk_norm == "all heads":
        raise ConfigError(OPTION, size, "1", "a norm of query and key is of all heads together")
    experts = config.experts
    if experts is not None:
        _require_divisible("the experts' intermediate size", experts.intermediate_size, size)
        experts = replace(experts, intermediate_size=experts.intermediate_size // size)
    own = heads // size
    return replace(
        config,
        num_heads=own,
        slopes=None if config.slopes is None else config.slopes[rank * own : (rank + 1) * own],
        num_kv_heads=max(1, kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        experts=experts,
    )


def _require_divisible(name: str, number: int, size: int) -> None:
    if number % size:
        raise ConfigError(OPTION, size, f"a divisor of {name}, {number}")


def shard_weights(weights: WeightMap, config: DecoderConfig, rank: int, size: int) -> WeightMap:
    """Return what one rank reads of a model's weights.

    Args:
        config: likewise; `shard_config` takes it.
        rank: from 0.

    Raises:
        UnsupportedOption: a family declares a linear that this module can't divide.
    """
    return {name: _shard(name, weight, config, rank, size) for name, weight in weights.items()}


def _shard(name: str, weight: Weight, config: DecoderConfig, rank: int, size: int) -> Weight:
    kind = name.rpartition(".")[2]
    if isinstance(weight, TensorWeight) or kind in _WHOLE:
        return weight
    if kind == "head":
        first, end = _vocabulary(config.info.vocab_size, rank, size)
        if isinstance(weight, TiedWeight):
            return replace(weight, rows=(first, end))
        return _with_rows(weight, [(first, end)])
    if isinstance(weight, LinearWeight):
        if kind == "qkv":
            units = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            return _with_rows(weight, _sections([config.head_dim * each for each in units], units, rank, size))
        if kind in ("gate_up", "up"):
            rows = [weight.num_rows // 2] * 2 if kind == "gate_up" else [weight.num_rows]
            return _with_rows(weight, _sections(rows, rows, rank, size))
        if kind in ("output", "down"):
            count = weight.in_features // size
            return replace(weight, in_features=count, first_column=rank * count, all_columns=weight.in_features)
    hint = f"{config.info.architecture} declares {name}, which can't be divided by its name"
    raise UnsupportedOption(OPTION, size, "1", hint)


def _vocabulary(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """Tokens of a rank's part of the head: equal parts, the last ones may have fewer."""
    most = -(-vocab_size // size)
    return min(vocab_size, rank * most), min(vocab_size, (rank + 1) * most)


def _sections(rows: Sequence[int], units: Sequence[int], rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Rows of a rank in a matrix of several sections, each of which has so many units that stay whole. Where there are
    fewer units than ranks, several ranks have the same one."""
    begin = 0
    for num_rows, num_units in zip(rows, units, strict=True):
        of_unit, count = num_rows // num_units, max(1, num_units // size)
        first = begin + rank * num_units // size * of_unit
        yield first, first + count * of_unit
        begin += num_rows


def _with_rows(weight: LinearWeight, ranges: Sequence[tuple[int, int]] | Iterator[tuple[int, int]]) -> LinearWeight:
    return replace(weight, parts=tuple(part for first, end in ranges for part in _cut(weight.parts, first, end)))


def _cut(parts: Sequence[Part], first: int, end: int) -> Iterator[Part]:
    """The parts of tensors that fill rows `first` to `end` of the stack of `parts`."""
    begin = 0
    for part in parts:
        low, high = max(first, begin), min(end, begin + part.rows)
        if low < high:
            yield Part(part.name, high - low, part.first_row + low - begin, part.all_rows or part.rows)
        begin += part.rows


def join_linears(parameters: Parameters, weights: WeightMap, ranks: Ranks, vocab_size: int) -> None:
    """Let the linears of a rank exchange what they must, within a group of more than one rank.

    Args:
        parameters: loaded by `weights`.
    """
    if ranks.size == 1:
        return
    for name in weights:
        kind = name.rpartition(".")[2]
        if kind == "head":
            parameters.replace_linear(name, GatheredLinear(parameters.linear(name), ranks, vocab_size))
        elif kind in ("output", "down") and EXPERT not in name:
            parameters.replace_linear(name, SummedLinear(parameters.linear(name), ranks))


class SummedLinear(Linear):
    """A linear divided by its columns: the ranks' products, with what adapters add to each, are added up, then the bias
    is added."""

    __slots__ = ("_ranks",)

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        super().__init__(part.method, part.bias)
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        product = self.method.product(x, None)
        total = self._ranks.sum(product if self.adapters is None else self.adapters.add(product, x))
        return total if self.bias is None else total + self.bias


class GatheredLinear(Linear):
    """A linear divided by its rows, whose whole result every rank gets."""

    __slots__ = ("_num_columns", "_ranks")

    def __init__(self, part: Linear, ranks: Ranks, num_columns: int) -> None:
        super().__init__(part.method, part.bias)
        self._ranks, self._num_columns = ranks, num_columns

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.concatenate(super().__call__(x), self._num_columns)
