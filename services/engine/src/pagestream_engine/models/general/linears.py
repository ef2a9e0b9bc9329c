"""Replace the linears of `transformers`' modelling code by the engine's, where nothing but their call is used."""

from __future__ import annotations

from torch import Tensor, nn

from pagestream_engine.layers.linear import Linear, choose_method, lays_out_anew
from pagestream_engine.layers.quantised import choose_quantised_method, quantise_int8


class EngineLinear(nn.Module):
    """A `torch.nn.Linear` that the engine computes."""

    def __init__(self, linear: nn.Linear, *, exact: bool, quantization: str | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.detach()
        weight = linear.weight.detach()
        if quantization is None:
            method = choose_method(weight, exact=exact)
        else:
            method = choose_quantised_method(quantise_int8(weight), weight.dtype, exact=exact)
        self.linear = Linear(method, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in features) -> (..., out features)."""
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


_ROUTERS = ("gate", "router")
"""Names of linears that choose experts, which keep the model's dtype."""


def replace_linears(model: nn.Module, *, exact: bool = False, quantization: str | None = None) -> dict[str, nn.Linear]:
    """Replace every linear whose weight nothing else has, where that is faster or its weight is to be quantised.

    Args:
        model: modelling code with its weights.
        exact: as `choose_method` has it.
        quantization: `ModelConfig.quantization`.

    Returns:
        The replaced modules by name, for `restore_linears`.
    """
    weight = next(model.parameters())
    lays_out = lays_out_anew(weight.device.type, weight.dtype, exact=exact)
    if not lays_out and quantization is None:
        return {}
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and owners[id(module.weight)] == 1 and not _has_hooks(module)
    }
    for name, module in list(found.items()):
        kept = name.rpartition(".")[2] in _ROUTERS
        if kept and not lays_out:
            del found[name]
            continue
        _set(model, name, EngineLinear(module, exact=exact, quantization=None if kept else quantization))
    return found


def restore_linears(model: nn.Module, replaced: dict[str, nn.Linear]) -> None:
    """Undo `replace_linears`: the modelling code uses more of a linear than its call."""
    for name, module in replaced.items():
        _set(model, name, module)


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
