"""Experts of `transformers`' modelling code, whose weights are one tensor for all of them, by the engine's linears.

Modelling code marks them by `use_experts_implementation`, which replaces their call: how they are laid out, whether
they have gates and biases, and how gates are applied are known then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pagestream_engine.layers.experts import ExpertLinears, NativeExperts, Routing
from pagestream_engine.layers.linear import Linear, choose_method, runs_experts_natively
from pagestream_engine.layers.quantised import choose_quantised_method, quantise_int8

_MARKS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "_apply_gate")


class EngineExperts:
    """The forward of one module of experts."""

    def __init__(self, module: Any, quantization: str | None) -> None:
        """Take a module's weights, of which it keeps none.

        Args:
            module: that `is_known`.
            quantization: `ModelConfig.quantization`.
        """
        self._module = module
        self._num_experts = len(module.down_proj)
        self._up, up_bytes = _take(module, "gate_up_proj" if module.has_gate else "up_proj", quantization)
        self._down, down_bytes = _take(module, "down_proj", quantization)
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


def take_over_experts(model: nn.Module, quantization: str | None) -> None:
    """Let the C++ kernels compute every module of experts that `is_known`; each one's tensors are freed in turn."""
    for module in filter(is_known, model.modules()):
        down = module.get_parameter("down_proj")
        if runs_experts_natively(down.device, down.dtype):
            module.forward = EngineExperts(module, quantization)


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


def _take(module: Any, name: str, quantization: str | None) -> tuple[ExpertLinears, int]:
    """Return the linears of a tensor of all experts' weights, and their bytes; free the tensor."""
    weights: Tensor = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    linears = []
    for weight, bias in zip(weights, biases, strict=True):
        matrix = (weight.T if module.is_transposed else weight).contiguous()
        if quantization is None:
            method = choose_method(matrix, exact=True)
        else:
            method = choose_quantised_method(quantise_int8(matrix), matrix.dtype, exact=True)
        linears.append(Linear(method, bias))
    setattr(module, name, nn.Parameter(weights.new_empty(0), requires_grad=False))
    return NativeExperts(linears), sum(linear.method.num_bytes for linear in linears)
