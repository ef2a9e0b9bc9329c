"""A name for the bits and texts that an engine produces: equal where the same tokens give the same results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from pagestream_engine.attention import Backend, CacheShape
from pagestream_engine.cpu import processor_identity, read_cpuinfo
from pagestream_engine.models.folder import model_revision
from pagestream_engine.runner.numerics import Numerics

FINGERPRINTED_SOURCES: Mapping[str, int] = {
    "pagestream_engine.adapters.additions": 2,
    "pagestream_engine.adapters.files": 4,
    "pagestream_engine.adapters.modules": 2,
    "pagestream_engine.adapters.native.library": 1,
    "pagestream_engine.adapters.native.lora": 5,
    "pagestream_engine.adapters.patterns": 2,
    "pagestream_engine.adapters.pool": 5,
    "pagestream_engine.adapters.rows": 1,
    "pagestream_engine.adapters.settings": 4,
    "pagestream_engine.attention.backend": 6,
    "pagestream_engine.attention.base": 8,
    "pagestream_engine.attention.float8": 1,
    "pagestream_engine.attention.kv_store": 10,
    "pagestream_engine.attention.native.activations": 1,
    "pagestream_engine.attention.native.attention": 7,
    "pagestream_engine.attention.native.calls": 8,
    "pagestream_engine.attention.native.kernels": 9,
    "pagestream_engine.attention.native.kv_store": 5,
    "pagestream_engine.attention.native.operators": 4,
    "pagestream_engine.attention.operators": 3,
    "pagestream_engine.attention.torch.attention": 4,
    "pagestream_engine.attention.torch.block_reads": 2,
    "pagestream_engine.attention.torch.deterministic_attention": 4,
    "pagestream_engine.attention.torch.deterministic_math": 1,
    "pagestream_engine.attention.torch.deterministic_operators": 3,
    "pagestream_engine.attention.torch.operators": 2,
    "pagestream_engine.attention.triton.attention": 10,
    "pagestream_engine.attention.triton.deterministic_attention": 3,
    "pagestream_engine.attention.triton.kv_store": 5,
    "pagestream_engine.attention.triton.operators": 3,
    "pagestream_engine.grammar.compiler": 5,
    "pagestream_engine.grammar.reasoning_gate": 1,
    "pagestream_engine.grammar.row_matcher": 4,
    "pagestream_engine.grammar.sampling": 5,
    "pagestream_engine.layers.attention": 5,
    "pagestream_engine.layers.exact_methods": 5,
    "pagestream_engine.layers.linear": 5,
    "pagestream_engine.layers.linear_methods": 4,
    "pagestream_engine.layers.mlp": 2,
    "pagestream_engine.layers.native.library": 7,
    "pagestream_engine.layers.native.linear": 6,
    "pagestream_engine.layers.native.panel_memory": 1,
    "pagestream_engine.layers.native.product": 3,
    "pagestream_engine.layers.native.quantised": 1,
    "pagestream_engine.layers.native.tiles": 2,
    "pagestream_engine.layers.native.vectors": 2,
    "pagestream_engine.layers.norm": 2,
    "pagestream_engine.layers.quantised.methods": 2,
    "pagestream_engine.layers.quantised.native": 1,
    "pagestream_engine.layers.quantised.select": 2,
    "pagestream_engine.layers.quantised.weight": 5,
    "pagestream_engine.layers.rope": 4,
    "pagestream_engine.models.config": 6,
    "pagestream_engine.models.decoder": 11,
    "pagestream_engine.models.decoder_config": 6,
    "pagestream_engine.models.division.sharding": 3,
    "pagestream_engine.models.division.staging": 2,
    "pagestream_engine.models.families.gemma2": 5,
    "pagestream_engine.models.families.gemma3": 2,
    "pagestream_engine.models.families.llama": 4,
    "pagestream_engine.models.families.mistral": 2,
    "pagestream_engine.models.families.mixtral": 4,
    "pagestream_engine.models.families.phi3": 2,
    "pagestream_engine.models.families.qwen2": 2,
    "pagestream_engine.models.families.qwen3": 2,
    "pagestream_engine.models.families.qwen3_moe": 3,
    "pagestream_engine.models.family_source": 15,
    "pagestream_engine.models.folder": 2,
    "pagestream_engine.models.general.interface": 2,
    "pagestream_engine.models.general.linears": 3,
    "pagestream_engine.models.general.masks": 3,
    "pagestream_engine.models.general.model": 5,
    "pagestream_engine.models.general.norms": 2,
    "pagestream_engine.models.general.probe": 3,
    "pagestream_engine.models.general.rotations": 1,
    "pagestream_engine.models.general.source": 12,
    "pagestream_engine.models.loader": 16,
    "pagestream_engine.models.model": 10,
    "pagestream_engine.models.quantised.linears": 2,
    "pagestream_engine.models.quantised.scheme": 3,
    "pagestream_engine.models.quantised.tensors": 1,
    "pagestream_engine.models.registry": 5,
    "pagestream_engine.models.safetensors_file": 4,
    "pagestream_engine.models.select": 3,
    "pagestream_engine.models.shared_weights": 2,
    "pagestream_engine.models.source": 14,
    "pagestream_engine.models.weights": 10,
    "pagestream_engine.parallel.ranks": 6,
    "pagestream_engine.parallel.stages": 2,
    "pagestream_engine.request.adapter": 2,
    "pagestream_engine.request.beam_search": 2,
    "pagestream_engine.request.checks": 3,
    "pagestream_engine.request.generation": 6,
    "pagestream_engine.request.grammars": 3,
    "pagestream_engine.request.intake": 11,
    "pagestream_engine.request.sampling_params": 14,
    "pagestream_engine.request.sequence": 18,
    "pagestream_engine.request.structured_outputs": 2,
    "pagestream_engine.runner.backends": 6,
    "pagestream_engine.runner.decode_graphs": 1,
    "pagestream_engine.runner.persistent_batch": 11,
    "pagestream_engine.runner.prompt_rows": 3,
    "pagestream_engine.runner.recorder": 1,
    "pagestream_engine.runner.runner": 44,
    "pagestream_engine.runner.sampled_tokens": 2,
    "pagestream_engine.runner.speculation.verification": 3,
    "pagestream_engine.sampler.batch": 6,
    "pagestream_engine.sampler.columns": 2,
    "pagestream_engine.sampler.draw": 3,
    "pagestream_engine.sampler.filters": 2,
    "pagestream_engine.sampler.logprobs": 3,
    "pagestream_engine.sampler.native.draw": 1,
    "pagestream_engine.sampler.native.library": 2,
    "pagestream_engine.sampler.noise": 1,
    "pagestream_engine.sampler.pipeline": 2,
    "pagestream_engine.sampler.prompt_logprobs": 1,
    "pagestream_engine.sampler.selection": 4,
    "pagestream_engine.sampler.stages.allowed_tokens": 2,
    "pagestream_engine.sampler.stages.bad_words": 4,
    "pagestream_engine.sampler.stages.logit_bias": 2,
    "pagestream_engine.sampler.stages.min_tokens": 3,
    "pagestream_engine.sampler.stages.penalties": 3,
    "pagestream_engine.sampler.stages.slots": 2,
    "pagestream_engine.sampler.stages.stage": 3,
    "pagestream_engine.sampler.stages.token_mask": 1,
    "pagestream_engine.sampler.stages.token_table": 3,
    "pagestream_engine.text.bad_words": 2,
    "pagestream_engine.text.detokenizer": 3,
    "pagestream_engine.text.stop_strings": 1,
    "pagestream_kernels.cache.copy_blocks": 1,
    "pagestream_kernels.decode.attend": 7,
    "pagestream_kernels.decode.merge": 2,
    "pagestream_kernels.decode.plan": 1,
    "pagestream_kernels.decode.shares": 2,
    "pagestream_kernels.decode_plan": 7,
    "pagestream_kernels.filter_and_draw": 3,
    "pagestream_kernels.launcher": 1,
    "pagestream_kernels.linear.fixed_order_matmul": 1,
    "pagestream_kernels.linear.int8_matmul": 1,
    "pagestream_kernels.linear.lora": 2,
    "pagestream_kernels.linear.lora_table": 1,
    "pagestream_kernels.paged_decode": 8,
    "pagestream_kernels.paged_prefill": 10,
    "pagestream_kernels.paging": 7,
    "pagestream_kernels.prefill.attend": 2,
    "pagestream_kernels.prefill.plan": 1,
    "pagestream_kernels.rms_norm": 3,
    "pagestream_kernels.rope.arguments": 1,
    "pagestream_kernels.rope.rope_and_quantise": 2,
    "pagestream_kernels.rope.turn": 2,
    "pagestream_kernels.rope_and_cache": 5,
    "pagestream_kernels.runtime": 7,
    "pagestream_kernels.silu_and_mul": 3,
    "pagestream_kernels.tables.chips.a100": 1,
    "pagestream_kernels.tables.chips.b200": 1,
    "pagestream_kernels.tables.chips.h100": 2,
    "pagestream_kernels.tables.chips.h200": 2,
    "pagestream_kernels.tables.chips.mi300x": 1,
    "pagestream_kernels.tables.rows": 1,
    "pagestream_kernels.tiles": 3,
}
"""Version of each source (a Python module, or C++ at that place) that decides tokens, bits of logits, or text.

Increase the version with any change to a source, then run `python tools/write_source_digests.py`. A unit test compares
the sources with the digests that were recorded for these versions, and finds sources that are missing here.
"""


def fingerprint(
    model_dir: Path,
    backend: Backend,
    max_model_len: int,
    numerics: Numerics,
    plugin_digest: str,
    *,
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
        shapes: of the KV groups with all layers: which stage has which of them changes no bit.
        quantization: `ModelConfig.quantization`.
        num_ranks: of a stage, whose parts of a sum are added up.
        takes_adapters: `AdapterConfig.enable_lora`, without which gates are multiplied where their product ends.
    """
    parts = [
        model_revision(model_dir),
        *(f"{source}={number}" for source, number in sorted(FINGERPRINTED_SOURCES.items())),
        *map(str, shapes),
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


def _device(device: torch.device) -> str:
    """What of a device decides bits. On a GPU that is its instructions and its name, by which kernels may have other
    tiles, and outside of deterministic mode libraries other algorithms. The CPU beside a GPU computes nothing."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        chip = f"sm_{major}{minor} {torch.cuda.get_device_name(device)}"
        return f"{chip} {torch.version.cuda} {torch.version.hip}"
    identity = hashlib.sha256(processor_identity(read_cpuinfo())).hexdigest()
    return f"{identity} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
