"""Experts of `transformers`' modelling code, whose weights are one tensor for all of them, by the engine's linears.

Modelling code marks them by `use_experts_implementation`, which replaces their call: how they are laid out, whether
they have gates and biases, and how gates are applied are known then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pagestream_engine.layers.experts import ExpertLinears, Routing, expert_linears
from pagestream_engine.layers.linear import Linear, choose_method, runs_experts_natively
from pagestream_engine.layers.quantised import QuantisedWeight, choose_quantised_method, quantise_int8, stack

_MARKS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "_apply_gate")


class EngineExperts:
    """The forward of one module of experts."""

    def __init__(self, module: Any, quantization: str | None, stored: Mapping[str, _Stored]) -> None:
        """Take a module's weights, of which it keeps none.

        Args:
            module: that `is_known`.
            quantization: `ModelConfig.quantization`.
            stored: by the names of the module's tensors, what a quantised checkpoint has for them.
        """
        self._module = module
        self._num_experts = len(module.down_proj)
        self._up, up_bytes = _take(module, "gate_up_proj" if module.has_gate else "up_proj", quantization, stored)
        self._down, down_bytes = _take(module, "down_proj", quantization, stored)
        self.num_bytes = up_bytes + down_bytes
        """Of the weights; biases stay the module's."""

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum the experts that tokens have chosen.

        Args:
            hidden_states: (tokens, hidden size).
            top_k_index: (tokens, choices) int64.
            top_k_weights: (tokens, choices).

        Returns:
            (tokens, hidden size).
        """
        chosen, places = top_k_index.sort(dim=-1)
        routing = Routing(chosen, self._num_experts)
        products = self._up(routing.rows_of(hidden_states), routing)
        module = self._module
        hidden = module._apply_gate(products) if module.has_gate else module.act_fn(products)
        rows = self._down(hidden, routing)
        if module.has_post_expert_norm:
            rows = module.post_expert_norm(rows)
        return routing.add_up(rows, top_k_weights.gather(-1, places), hidden_states.dtype)


def take_over_experts(model: nn.Module, quantization: str | None, stored: Mapping[str, QuantisedWeight]) -> None:
    """Let the C++ kernels compute every module of experts that `is_known`; each one's tensors are freed in turn.

    Args:
        model: modelling code with its weights.
        quantization: `ModelConfig.quantization`.
        stored: weights of a quantised checkpoint by the names of their projections; those of a tensor for all experts
            by its name and their numbers.
    """
    by_layer = _by_layer(stored)
    for name, module in model.named_modules():
        if not is_known(module):
            continue
        down = module.get_parameter("down_proj")
        if runs_experts_natively(down.device, down.dtype):
            layer = _LAYER.search(name)
            own = by_layer.get(int(layer[1]), {}) if layer else {}
            module.forward = EngineExperts(module, quantization, _whole(own, len(down)))


_LAYER = re.compile(r"\blayers\.(\d+)\.")
_OF_EXPERT = re.compile(r"\blayers\.(\d+)\..*\bexperts\.(?:(\d+)\.)?(\w+?)(?:\.(\d+))?$")
"""Layer, expert, projection; the expert comes last where the checkpoint has a tensor for all."""
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_Stored = Sequence[QuantisedWeight]
"""Of each expert."""


def _by_layer(stored: Mapping[str, QuantisedWeight]) -> dict[int, dict[tuple[str, int], QuantisedWeight]]:
    """Return, of each layer that has experts, their weights by projection and expert."""
    found: dict[int, dict[tuple[str, int], QuantisedWeight]] = {}
    for name, weight in stored.items():
        match = _OF_EXPERT.search(name)
        if match and (match[2] or match[4]):
            found.setdefault(int(match[1]), {})[match[3], int(match[2] or match[4])] = weight
    return found


def _whole(weights: Mapping[tuple[str, int], QuantisedWeight], num_experts: int) -> dict[str, _Stored]:
    """Return a layer's weights by the names of a module's tensors; a gate's rows are before those of what it gates."""

    def of_all(*names: Sequence[str]) -> _Stored | None:
        parts = [
            [next((weights[name, index] for name in each if (name, index) in weights), None) for each in names]
            for index in range(num_experts)
        ]
        return [stack([each for each in part if each is not None]) for part in parts if None not in part]

    found = {
        "gate_up_proj": of_all(("gate_up_proj",)) or of_all(_GATES, _UPS),
        "up_proj": of_all(_UPS),
        "down_proj": of_all(_DOWNS),
    }
    return {name: each for name, each in found.items() if each is not None and len(each) == num_experts}


def experts_of(model: nn.Module) -> Iterator[EngineExperts]:
    """Yield what computes a model's experts, where the engine does."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return (each for each in forwards if isinstance(each, EngineExperts))


def is_known(module: nn.Module) -> bool:
    """Return whether `use_experts_implementation` marks a module, and it has the weights that go with that."""
    if not all(hasattr(module, mark) for mark in _MARKS) or module._is_expert_parallel:
        return False
    up = module._parameters.get("gate_up_proj" if module.has_gate else "up_proj")
    down = module._parameters.get("down_proj")
    return up is not None and down is not None and up.dim() == down.dim() == 3


def _take(module: Any, name: str, quantization: str | None, stored: Mapping[str, _Stored]) -> tuple[ExpertLinears, int]:
    """Return the linears of a tensor of all experts' weights, and their bytes; free the tensor."""
    weights: Tensor = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    matrices = weights.transpose(1, 2) if module.is_transposed else weights
    in_bits = stored.get(name)
    if in_bits is not None and not torch.equal(in_bits[0].dequantised(weights.dtype), matrices[0]):
        in_bits = None  # The modelling code has another order of rows.
    linears = []
    for index, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
        if in_bits is not None:
            method = choose_quantised_method(in_bits[index], weights.dtype, exact=True)
        elif quantization is None:
            method = choose_method(matrix.contiguous(), exact=True)
        else:
            method = choose_quantised_method(quantise_int8(matrix), weights.dtype, exact=True)
        linears.append(Linear(method, bias))
    setattr(module, name, nn.Parameter(weights.new_empty(0), requires_grad=False))
    return expert_linears(linears), sum(linear.method.num_bytes for linear in linears)
