"""Settle whether a model computes bit for bit the same in any batch on this machine, and name what decides its bits.

The fingerprint is that name: equal where the same tokens give the same results and texts.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from pagestream_engine.attention import Backend, CacheShape
from pagestream_engine.cpu import computes_bfloat16_on_amx, processor_identity, read_cpuinfo
from pagestream_engine.errors import ConfigError
from pagestream_engine.layers.linear import native_linears
from pagestream_engine.models.defaults import read_if_there
from pagestream_engine.models.folder import model_revision
from pagestream_engine.models.model import Model, ModelSource
from pagestream_engine.models.published import quantization_of
from pagestream_engine.models.tokenizer import has_first_texts
from pagestream_engine.numerics_versions import NUMERICS

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


# What the last release hashed in place of versions of numerics, when it declared one for each of 160 modules. The lines
# are opaque, and name no file any more. An engine whose NUMERICS are all 1 computes as that release does, and has its
# fingerprint, so that a rollout from one to the other waits for nothing. Once a version is 2 no engine has that
# fingerprint: delete the file then, and hash every version.
_FIRST_VERSIONS = Path(__file__).with_name("first_versions.txt")
_BY_DECODER = 2
"""Version of `text` since which added tokens pass the decoder (docs/design/tool-calls.md#tokenizing-prompts)."""
_BY_SORTED_EXPERTS = 2
"""Version of `torch` since which all experts of a layer compute in one call, over tokens sorted by them."""
_BY_TILES = 2
"""Version of `native` since which weights of fewer bits are widened to tiles of bfloat16; others compute as before."""


def fingerprint(
    model_dir: Path,
    backend: Backend,
    max_model_len: int,
    numerics: Numerics,
    plugin_digest: str,
    *,
    has_experts: bool,
    shapes: Sequence[CacheShape],
    quantization: str | None,
    num_ranks: int,
    takes_adapters: bool,
) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over all that the bits of a logit may depend on; of weights over
    samples, as `model_revision` says.

    Args:
        model_dir: the model's folder.
        backend: that it runs on.
        max_model_len: longest sequence, in tokens.
        numerics: the settled mode.
        plugin_digest: `ModelSource.plugin_digest`.
        has_experts: whether the model may have them.
        shapes: of the KV groups with all layers: which stage has which of them changes no bit.
        quantization: `ModelConfig.quantization`.
        num_ranks: of a stage, whose parts of a sum are added up.
        takes_adapters: `AdapterConfig.enable_lora`, without which gates are multiplied where their product ends.
    """
    unused = _unused(backend, model_dir, has_experts=has_experts, quantization=quantization)
    parts = [
        model_revision(model_dir),
        *_FIRST_VERSIONS.read_text().splitlines(),
        *(f"{name}={NUMERICS[name]}" for name in sorted(NUMERICS.keys() - unused) if NUMERICS[name] > 1),
        *map(_shape, shapes),
        str(max_model_len),
        backend.name,
        backend.kernel_version,
        "deterministic" if numerics.deterministic else "default",
        numerics.linears,
        torch.__version__,
        version("llguidance"),
        _device(backend.store.device),
        plugin_digest,
        quantization or "",
        f"{num_ranks} ranks",
        "adapters" if takes_adapters else "",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _unused(backend: Backend, model_dir: Path, *, has_experts: bool, quantization: str | None) -> set[str]:
    """Return those of NUMERICS whose changes change nothing that an engine gives: no request waits for them."""
    unused = set()
    if backend.store.device.type == "cuda":
        unused.add("native")
    elif backend.name != "triton":
        unused.add("triton")
    if NUMERICS["text"] == _BY_DECODER and has_first_texts(model_dir):
        unused.add("text")
    if NUMERICS["torch"] == _BY_SORTED_EXPERTS and not has_experts:
        unused.add("torch")
    if NUMERICS["native"] == _BY_TILES and quantization is None and not _is_quantised(model_dir):
        unused.add("native")
    return unused


def _is_quantised(model_dir: Path) -> bool:
    return quantization_of(model_dir, read_if_there(model_dir / "config.json")) is not None


def _shape(shape: CacheShape) -> str:
    """What of a cache's shape decides bits, written as the class's `repr` once was: a renamed class has the same."""
    return (
        f"CacheShape(layers={shape.layers}, num_kv_heads={shape.num_kv_heads}, head_dim={shape.head_dim}, "
        f"block_size={shape.block_size}, dtype={shape.dtype}, cache_dtype={shape.cache_dtype})"
    )


def _device(device: torch.device) -> str:
    """What of a device decides bits. On a GPU that is its instructions and its name, by which kernels may have other
    tiles, and outside of deterministic mode libraries other algorithms. The CPU beside a GPU computes nothing."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        chip = f"sm_{major}{minor} {torch.cuda.get_device_name(device)}"
        return f"{chip} {torch.version.cuda} {torch.version.hip}"
    identity = hashlib.sha256(processor_identity(read_cpuinfo())).hexdigest()
    return f"{identity} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
