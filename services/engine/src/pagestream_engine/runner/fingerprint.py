"""A name for the bits and texts that an engine produces: equal where the same tokens give the same results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pagestream_engine.attention import AttentionBackend
from pagestream_engine.cpu import processor_identity, read_cpuinfo
from pagestream_engine.models.folder import model_revision
from pagestream_engine.runner.numerics import Numerics

FINGERPRINTED_SOURCES: Mapping[str, int] = {
    "pagestream_engine.attention.base": 1,
    "pagestream_engine.attention.exact_math": 1,
    "pagestream_engine.attention.exact_torch_backend": 1,
    "pagestream_engine.attention.native.calls": 1,
    "pagestream_engine.attention.native.kernels": 1,
    "pagestream_engine.attention.native_backend": 1,
    "pagestream_engine.attention.torch_backend": 1,
    "pagestream_engine.attention.triton_backend": 1,
    "pagestream_engine.layers.linear": 1,
    "pagestream_engine.layers.rope": 1,
    "pagestream_engine.layers.row_counts": 1,
    "pagestream_engine.models.config": 1,
    "pagestream_engine.models.folder": 1,
    "pagestream_engine.models.llama": 1,
    "pagestream_engine.models.loader": 1,
    "pagestream_engine.models.safetensors_file": 1,
    "pagestream_engine.request.generation": 1,
    "pagestream_engine.request.sampling_params": 1,
    "pagestream_engine.request.sequence": 1,
    "pagestream_engine.request.token_counts": 1,
    "pagestream_engine.runner.batch": 1,
    "pagestream_engine.runner.runner": 1,
    "pagestream_engine.sampler.adjust": 1,
    "pagestream_engine.sampler.filters": 1,
    "pagestream_engine.sampler.logprobs": 1,
    "pagestream_engine.sampler.noise": 1,
    "pagestream_engine.sampler.sampler": 1,
    "pagestream_engine.text.detokenizer": 1,
    "pagestream_engine.text.stop_strings": 1,
    "pagestream_kernels.decode_plan": 1,
    "pagestream_kernels.paged_decode": 1,
    "pagestream_kernels.paged_prefill": 1,
    "pagestream_kernels.paging": 1,
    "pagestream_kernels.rms_norm": 1,
    "pagestream_kernels.rope_and_cache": 1,
    "pagestream_kernels.runtime": 2,
    "pagestream_kernels.silu_and_mul": 1,
}
"""Version of each source (a Python module, or C++ at that place) that decides tokens, bits of logits, or text.

Increase the version with any change to a source, then run `python tools/write_source_digests.py`. A unit test compares
the sources with the digests that were recorded for these versions, and finds sources that are missing here.
"""


def fingerprint(model_dir: Path, backend: AttentionBackend[Any], max_model_len: int, numerics: Numerics) -> str:
    """Return 16 hexadecimal digits of a SHA-256 over all that the bits of a logit may depend on."""
    shape = backend.shape
    parts = [
        model_revision(model_dir),
        *(f"{source}={version}" for source, version in sorted(FINGERPRINTED_SOURCES.items())),
        str(shape.dtype),
        str(shape.block_size),
        str(max_model_len),
        type(backend).__name__,
        backend.kernel_version,
        "deterministic" if numerics.deterministic else "default",
        numerics.linears.hex(),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
        _device(backend.device),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
    return hashlib.sha256(processor_identity(read_cpuinfo())).hexdigest()
