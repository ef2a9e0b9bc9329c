"""Mixtures of experts: each token's rows go to the experts of its choice, and all experts' products are one operation.

Rows are sorted by expert, so that an expert's are together; where they end is known to the device alone, and the host
waits for none of it: by the C++ kernels on a CPU, by `torch.nn.functional.grouped_mm` on a GPU. A token's results are
added in the order of its experts' numbers, each rounded to the dtype: the same in any batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.attention import Activation, Operators
from pagestream_engine.layers.linear import Linear, NativeMethod, PackedGroup, PlainMethod
from pagestream_engine.layers.quantised import NativeQuantisedMethod

_GROUPED_BYTES = 16
"""`grouped_mm` on a GPU takes rows of multiples of this."""


class Routing:
    """Which rows the experts get of a step's tokens."""

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        """`chosen`: (tokens, choices) int64, each token's experts in ascending order; none twice."""
        self._shape = chosen.shape
        experts = chosen.flatten()
        self.order = experts.argsort(stable=True)
        """(tokens * choices,) int64: which choice each row is of, sorted by expert, then by token."""
        self.experts = experts[self.order]
        """(tokens * choices,) int64: of each row."""
        numbers = torch.arange(num_experts, device=chosen.device)
        self.ends = torch.searchsorted(self.experts, numbers, right=True, out_int32=True)
        """(experts,) int32: the row before which each expert's end."""

    def rows_of(self, x: Tensor) -> Tensor:
        """(tokens, size) -> (rows, size)."""
        return x[self.order // self._shape[1]]

    def add_up(self, rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum each token's rows.

        Args:
            rows: (rows, size).
            weights: (tokens, choices), in the order of `chosen`.
            dtype: of the sum, in which each addition rounds.

        Returns:
            (tokens, size).
        """
        num_tokens, choices = self._shape
        weighted = (rows * weights.flatten()[self.order, None]).to(dtype)
        by_token = (
            torch.empty_like(weighted).index_copy_(0, self.order, weighted).view(num_tokens, choices, rows.shape[1])
        )
        total = torch.zeros_like(by_token[:, 0])
        for choice in range(choices):
            total += by_token[:, choice]
        return total

    @cached_property
    def slices(self) -> list[tuple[int, slice]]:
        """Each expert that has rows, and these. Waits for the device."""
        ends = self.ends.tolist()
        return [
            (index, slice(begin, end))
            for index, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
            if end > begin
        ]


class ExpertLinears(ABC):
    """The same linear of each expert."""

    fuses_gates: bool = False
    """Whether `gated` is available."""

    @abstractmethod
    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """(rows, in features) -> (rows, out features), of rows by `routing`."""

    def gated(self, x: Tensor, routing: Routing, activation: Activation) -> Tensor:
        """As `Linear.gated`: (rows, in features) -> (rows, out features / 2)."""
        raise NotImplementedError("these linears do not fuse gates")


class NativeExperts(ExpertLinears):
    """By the C++ kernels, the experts one after the other, within one call."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        """Take linears that are `native_alike`."""
        methods = [
            linear.method for linear in linears if isinstance(linear.method, NativeMethod | NativeQuantisedMethod)
        ]
        biases = [linear.bias.contiguous() for linear in linears if linear.bias is not None]
        self._group = PackedGroup([method.packed for method in methods if method.packed is not None], biases or None)
        self._method = first = methods[0]
        self._orders: Tensor | None = None
        if isinstance(first, NativeQuantisedMethod):
            orders = [method.order for method in methods if isinstance(method, NativeQuantisedMethod)]
            given = [order for order in orders if order is not None]
            if given:
                plain = torch.arange(first.shape[1])
                self._orders = torch.stack([plain if order is None else order for order in orders])
        self.fuses_gates = first.fuses_gates

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self._multiply(x, routing, None)

    def gated(self, x: Tensor, routing: Routing, activation: Activation) -> Tensor:
        return self._multiply(x, routing, activation)

    def _multiply(self, x: Tensor, routing: Routing, activation: Activation | None) -> Tensor:
        method = self._method
        if x.dtype != method.dtype or x.shape[1] != method.shape[1]:
            raise method.misfit(x)
        x = x.contiguous() if self._orders is None else x.gather(1, self._orders[routing.experts])
        if isinstance(method, NativeQuantisedMethod):
            return method.kernels.multiply_groups(x, self._group, routing.ends, method.layout, activation)
        return method.kernels.multiply_groups(x, self._group, routing.ends, method.shape[0], activation)


class GroupedExperts(ExpertLinears):
    """By `grouped_mm` of torch, with all experts' weights in one tensor."""

    def __init__(self, weights: Tensor, biases: Tensor | None) -> None:
        """Args:
        weights: (experts, out features, in features).
        biases: (experts, out features), or None.
        """
        self._weights = weights.transpose(1, 2)
        self._biases = biases

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        y = F.grouped_mm(x, self._weights, offs=routing.ends)
        return y if self._biases is None else y + self._biases[routing.experts]


class SeparateExperts(ExpertLinears):
    """Each expert by its own method, where no kernel takes all of them: waits for the device, once a layer."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        out = torch.empty(len(x), self._linears[0].method.shape[0], dtype=x.dtype, device=x.device)
        for index, rows in routing.slices:
            out[rows] = self._linears[index](x[rows])
        return out


def expert_linears(linears: Sequence[Linear]) -> ExpertLinears:
    """Choose how the same linear of each expert is computed. Weights that become one tensor are its slices then."""
    if native_alike(linears):
        return NativeExperts(linears)
    weights = _stacked(linears)
    if weights is None:
        return SeparateExperts(linears)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return GroupedExperts(weights, torch.stack(biases) if biases else None)


def native_alike(linears: Sequence[Linear]) -> bool:
    """Return whether one call of the C++ kernels takes all of these."""
    methods = [linear.method for linear in linears]
    first = methods[0]
    if isinstance(first, NativeMethod):
        return all(isinstance(method, NativeMethod) and method.packed is not None for method in methods)
    if isinstance(first, NativeQuantisedMethod):
        return all(isinstance(method, NativeQuantisedMethod) and method.layout == first.layout for method in methods)
    return False


def _stacked(linears: Sequence[Linear]) -> Tensor | None:
    """Return (experts, out features, in features) that holds the weights; None where `grouped_mm` can't take them."""
    methods = [linear.method for linear in linears if isinstance(linear.method, PlainMethod)]
    if len(methods) < len(linears):
        return None
    weights = [method.weight for method in methods]
    first = weights[0]
    aligned = all(size * first.itemsize % _GROUPED_BYTES == 0 for size in first.shape)
    if first.device.type != "cuda" or first.dtype != torch.bfloat16 or not aligned:
        return None
    if len({weight.untyped_storage().data_ptr() for weight in weights}) < len(weights):
        return None  # of a buffer through which layers take turns
    whole = torch.stack(weights)
    for method, weight in zip(methods, whole, strict=True):
        method.weight = weight
    return whole


class MixtureOfExperts:
    """Each token's sum of a few gated MLPs, chosen and weighted by a router (Fedus et al. 2021, arXiv:2101.03961)."""

    def __init__(
        self,
        router: Linear,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        activation: Activation,
        operators: Operators,
        *,
        experts_per_token: int,
        normalises: bool,
    ) -> None:
        """Args:
        gate_up: of each expert, with the rows of the gate, then those of the up projection.
        down: of each expert.
        normalises: whether the weights of a token's experts are divided by their sum.
        """
        self._router = router
        self._gate_up, self._down = expert_linears(gate_up), expert_linears(down)
        self._num_experts = len(down)
        self._activation = activation
        self._gated = operators.gated_by(activation)
        self._experts_per_token = experts_per_token
        self._normalises = normalises

    def __call__(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self._router(x).float(), dim=-1)
        weights, chosen = probabilities.topk(self._experts_per_token, dim=-1)
        if self._normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen, places = chosen.sort(dim=-1)
        routing = Routing(chosen, self._num_experts)
        rows = routing.rows_of(x)
        if self._gate_up.fuses_gates:
            hidden = self._gate_up.gated(rows, routing, self._activation)
        else:
            hidden = self._gated(self._gate_up(rows, routing))
        return routing.add_up(self._down(hidden, routing), weights.to(x.dtype).gather(-1, places), x.dtype)
