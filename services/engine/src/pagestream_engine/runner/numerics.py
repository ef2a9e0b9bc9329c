"""Settle whether a model computes bit for bit the same in any batch on this machine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from time import perf_counter

import torch

from pagestream_engine.attention import Backend
from pagestream_engine.cpu import computes_bfloat16_on_amx, emulates_bfloat16_in_avx512, read_cpuinfo
from pagestream_engine.errors import ConfigError
from pagestream_engine.models.model import Model
from pagestream_engine.models.source import ModelSource

_log = logging.getLogger(__name__)

_VARIES = "there a row's bits change with the rows beside it, and the trial at load does not find all such cases"
_ON_AMX = f"{_VARIES}; set dtype to float32, or ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment before the start"
_VARIES_BETWEEN = "functions that it computes beside linears and attention give a token other bits in another batch"
_IN_AVX512 = f"{_VARIES}; set dtype to float32"


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a loaded model computes."""

    deterministic: bool
    """Whether a token's logits depend on its sequence alone, bit for bit."""
    linears: bytes
    """Digest of the bits that the linears give trial rows; empty where none were tried."""


def possible_mode(wanted: bool | None, dtype: torch.dtype, device: torch.device) -> bool | None:
    """Return the mode to settle: `wanted`, or False instead of None where deterministic mode is not available.

    oneDNN's AMX kernels in bfloat16 change a row's bits with the number of rows, and the trial with random rows at load
    has called row counts equal that were not: of 64 requests, 31 got other log probabilities in a batch than alone. The
    same was seen of its AVX-512 kernels on a processor without instructions for bfloat16.

    Args:
        wanted: `ModelConfig.deterministic`.
        dtype: of the weights.
        device: that computes.

    Raises:
        ConfigError: `wanted` is True, and the model computes in bfloat16 on a CPU with AMX, or with AVX-512 and no
            instructions for bfloat16.
    """
    if wanted is False or dtype != torch.bfloat16 or device.type != "cpu":
        return wanted
    cpuinfo = read_cpuinfo()
    if computes_bfloat16_on_amx(cpuinfo, os.environ):
        where, why = "a CPU with AMX", _ON_AMX
    elif emulates_bfloat16_in_avx512(cpuinfo, os.environ):
        where, why = "a CPU with AVX-512 and no instructions for it", _IN_AVX512
    else:
        return wanted
    if wanted:
        raise ConfigError("deterministic", True, f"False or None in bfloat16 on {where}", why)
    _log.info("deterministic mode is off: it is not available in bfloat16 on %s", where)
    return False


def check_model_allows(wanted: bool | None, model: Model | ModelSource) -> None:
    """Raise ConfigError where deterministic mode is `wanted` of a model that computes something between its linears
    that varies with the batch."""
    if wanted and not model.can_be_deterministic:
        raise ConfigError("deterministic", True, f"False or None for {model.info.architecture}", _VARIES_BETWEEN)


def settle_numerics(model: Model, backend: Backend, wanted: bool | None) -> Numerics:
    """Make the model's linears batch-invariant if `wanted`, or if it is None and costs next to nothing here.

    Args:
        model: whose linears are tried.
        backend: where it is not deterministic, nothing can be.
        wanted: `ModelConfig.deterministic`.

    Raises:
        ConfigError: as `check_model_allows`.
    """
    check_model_allows(wanted, model)
    if wanted is False or not backend.is_deterministic or not model.can_be_deterministic:
        return Numerics(False, b"")
    started = perf_counter()
    tried = model.probe_row_counts()
    _log.info("tried the row counts of %d shapes of linears in %.2f s", len(tried), perf_counter() - started)
    if wanted is None and not all(row_counts.is_free for row_counts in tried):
        _log.info("deterministic mode is off: on this machine it costs speed; option deterministic turns it on")
        return Numerics(False, b"")
    model.use_row_counts()
    return Numerics(True, b"".join(row_counts.digest for row_counts in tried))
