"""Settle whether a model computes bit for bit the same in any batch on this machine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from pagestream_engine.attention import Backend
from pagestream_engine.cpu import computes_bfloat16_on_amx, read_cpuinfo
from pagestream_engine.errors import ConfigError
from pagestream_engine.layers.linear import native_linears
from pagestream_engine.models.model import Model
from pagestream_engine.models.source import ModelSource

_log = logging.getLogger(__name__)

_VARIES_BETWEEN = "functions that it computes beside linears and attention give a token other bits in another batch"
_ROUTES_BY_TORCH = (
    "its router's softmax and sums are torch's, whose order of additions on a GPU depends on the number of tokens"
)
_NOT_TIMED_ON_AMX = (
    "deterministic mode is off: in bfloat16 by AMX its linears have not been timed beside oneDNN's; "
    "`pagestream doctor` times them, option deterministic turns it on"
)


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a loaded model computes."""

    deterministic: bool
    """Whether a token's logits depend on its sequence alone, bit for bit."""
    linears: str
    """What fixes the order of additions in its linears; empty where nothing does."""


def check_model_allows(wanted: bool | None, model: Model | ModelSource, *, by_triton: bool = False) -> None:
    """Raise ConfigError where deterministic mode is `wanted` of a model that computes something between its linears
    that varies with the batch.

    Args:
        wanted: `ModelConfig.deterministic`.
        model: before its weights are loaded, or after.
        by_triton: whether it runs on the Triton kernels.
    """
    if not wanted:
        return
    refused = f"False or None for {model.info.architecture}"
    if not model.can_be_deterministic:
        raise ConfigError("deterministic", True, refused, _VARIES_BETWEEN)
    if by_triton and isinstance(model, ModelSource) and model.routes_tokens:
        raise ConfigError("deterministic", True, refused + " with the Triton kernels", _ROUTES_BY_TORCH)


def wants_exact_linears(
    wanted: bool | None, dtype: torch.dtype, device: torch.device, *, by_triton: bool = False
) -> bool:
    """Return whether to load linears by which a row has the same bits in any batch: if asked for, or if it is free.

    It is free where the C++ kernels of linears are as fast as the libraries below torch: not at levels without fused
    multiply-add, and not in bfloat16 on AMX, where they have not been timed. Times of this start do not decide: with
    the load of the moment a restart could change the mode, and with it the fingerprint that a resumed request needs.
    With the Triton kernels it has not been measured, and counts as not free.

    Args:
        wanted: `ModelConfig.deterministic`.
        device: that computes.
        by_triton: whether the model runs on the Triton kernels.
    """
    if wanted is not None or by_triton or device.type != "cpu":
        return wanted is True
    if dtype == torch.bfloat16 and computes_bfloat16_on_amx(read_cpuinfo(), os.environ):
        _log.info(_NOT_TIMED_ON_AMX)
        return False
    kernels = native_linears(dtype)
    return kernels is not None and kernels.level.is_fast


def settle_numerics(model: Model, backend: Backend, dtype: torch.dtype, *, exact_linears: bool) -> Numerics:
    """Return how a model computes.

    Args:
        backend: that it runs on.
        exact_linears: what `wants_exact_linears` has returned.
    """
    if not exact_linears:
        return Numerics(deterministic=False, linears="")
    deterministic = backend.is_deterministic and model.can_be_deterministic
    if backend.name == "triton":
        return Numerics(deterministic, linears="fixed-order Triton")
    kernels = native_linears(dtype)
    return Numerics(deterministic, linears="row by row" if kernels is None else kernels.level.name)
