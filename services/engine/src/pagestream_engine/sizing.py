"""What a model needs of a device's memory, by its configuration alone: weights, KV cache, and what then fits.

Nothing is loaded. Weights and cache are counted from the same declarations by which the engine loads and allocates
them; activations are estimated, where an engine measures them at its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagestream_engine.attention.base import block_bytes
from pagestream_engine.config import TRITON_BLOCK_SIZE, EngineConfig, ParallelConfig
from pagestream_engine.errors import ConfigError, UnsupportedModel
from pagestream_engine.models.config import DTYPES, ConfigFile
from pagestream_engine.models.decoder import DecoderConfig
from pagestream_engine.models.division.sharding import shard_config, shard_weights
from pagestream_engine.models.division.staging import weights_of_stage
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.models.loader import num_elements, stored_bytes
from pagestream_engine.models.offload import plan_offload
from pagestream_engine.models.quantised.scheme import Scheme
from pagestream_engine.models.registry import find_family, fused_architectures
from pagestream_engine.models.weights import WeightMap
from pagestream_engine.parallel.rank import layers_of_stage
from pagestream_engine.plan import KVLayout
from pagestream_engine.runner.backends import cache_shapes, kv_layout

GB = 10**9
CARDS: Mapping[str, int] = {
    "L4": 24 * GB,
    "A10G": 24 * GB,
    "L40S": 48 * GB,
    "A100-40": 40 * GB,
    "A100-80": 80 * GB,
    "H100": 80 * GB,
    "H200": 141 * GB,
    "B200": 180 * GB,
    "MI300X": 192 * GB,
}
"""Bytes of memory by the vendors' data sheets, with a gigabyte as 10^9 bytes: a driver reports a little more."""
CONTEXTS = (1024, 4096, 32_768, 131_072)
"""Tokens of a sequence for which the largest batch is given, as far as the model has them."""
RANKS = (1, 2, 4, 8)
"""Cards of a machine, among which a model may be divided."""
_BYTES_PER_LOGIT = 12
"""A sampler's float32 logits, and two temporaries of their size."""
_LIVE_HIDDEN = 4
"""Tensors of a token's hidden size that a layer holds beside its MLP: residual, norm, query and output."""


@dataclass(frozen=True)
class ModelSize:
    """What a model takes of a device: where ranks divide it, of that which needs most for weights."""

    architecture: str
    dtype: str
    num_parameters: int
    """Of the whole model."""
    weight_bytes: int
    """On the device."""
    host_weight_bytes: int
    """In host memory, by `cpu_offload_gb`."""
    kv_bytes_per_token: float
    """Of one more token in a long sequence: layers with a window take none."""
    block_bytes: int
    """Of one KV block over all layers of a group."""
    activation_bytes: int
    """An estimate of the largest step's."""
    max_model_len: int
    """Tokens, as its configuration or the settings have it."""
    layout: KVLayout
    max_chunk: int
    """Most tokens of a sequence that a step computes."""

    def num_blocks(self, memory_bytes: int, utilization: float) -> int:
        """Return the KV blocks that fit beside weights and activations; 0 where these do not fit themselves."""
        left = int(memory_bytes * utilization) - self.weight_bytes - self.activation_bytes
        return max(0, left // self.block_bytes)

    def num_sequences(self, num_blocks: int, context: int) -> int:
        """Return how many sequences of `context` tokens so many blocks hold at once."""
        return num_blocks // self.layout.num_blocks_for(context, self.max_chunk)


def size_model(model: str | Path, config: EngineConfig) -> ModelSize:
    """Size a model from its `config.json`.

    Args:
        model: a model folder, or the name of a Hugging Face repository.
        config: settings; without a `block_size`, blocks are those of a GPU.

    Raises:
        ModelNotFound: there is no such model.
        ModelFileError: its configuration is malformed.
        UnsupportedModel: it is of no fused family: others show their layers only once they are loaded.
        ConfigError: `cpu_offload_gb` would free no memory, or ranks can't divide the model.
    """
    size = size_config(ConfigFile.read(resolve_model(model)), config)
    draft_model = config.speculation.speculative_model
    if draft_model is None:
        return size
    options = replace(config.model, dtype=size.dtype, cpu_offload_gb=0.0, max_model_len=None)
    own = replace(config, model=options, parallel=ParallelConfig())  # each rank has all of it
    return _with_draft(size, size_config(ConfigFile.read(resolve_model(draft_model)), own))


def _with_draft(size: ModelSize, draft: ModelSize) -> ModelSize:
    """Add a draft model's weights, and its page of each block, which has the tokens of the first full group."""
    of_token = (
        2
        * DTYPES[size.dtype].itemsize
        * sum(len(group.layers) * group.spec.elements_per_token for group in draft.layout.groups)
    )
    num_tokens = next((group.block_size for group in size.layout.groups if group.spec.window is None), 0)
    return replace(
        size,
        weight_bytes=size.weight_bytes + draft.weight_bytes,
        kv_bytes_per_token=size.kv_bytes_per_token + of_token,
        block_bytes=size.block_bytes + of_token * num_tokens,
    )


def size_config(file: ConfigFile, config: EngineConfig) -> ModelSize:
    """Do `size_model` with a configuration that is read."""
    family = next(filter(None, map(find_family, file.architectures)), None)
    if family is None:
        given, expected = ", ".join(file.architectures) or "none", ", ".join(fused_architectures())
        raise UnsupportedModel(f"config.json: architectures: given {given}, expected one that can be sized: {expected}")
    decoder = family.read(file)
    if not isinstance(decoder, DecoderConfig):
        raise UnsupportedModel(f"{decoder.info.architecture}: given a family without a DecoderConfig, which has sizes")
    dtype = decoder.info.dtype if config.model.dtype == "auto" else DTYPES[config.model.dtype]
    longest = config.model.max_model_len or decoder.info.max_position_embeddings
    block_size = config.cache.block_size or TRITON_BLOCK_SIZE
    num_ranks, weights = config.parallel.tensor_parallel_size, family.weights(decoder)
    num_parameters, num_stages = count_parameters(weights), config.parallel.pipeline_parallel_size
    stage, weights = _largest_stage(weights, decoder, num_stages)
    if num_ranks > 1:
        weights, decoder = shard_weights(weights, decoder, 0, num_ranks), shard_config(decoder, 0, num_ranks)
    layout = kv_layout(family.attention_specs(decoder, longest), block_size, longest, num_stages)
    own_layers = layers_of_stage(len(decoder.layers), stage, num_stages)
    of_block = block_bytes(cache_shapes(layout, dtype, config.cache.kv_cache_dtype, own_layers))
    scheme = Scheme.read(file)
    if scheme is not None:
        scheme.check_options(config.model.quantization, offloads=config.model.cpu_offload_gb > 0)
    on_cpu = config.model.device == "cpu"
    weight_bytes = stored_bytes(weights, dtype, config.model.quantization, scheme, on_cpu=on_cpu)
    host_weight_bytes = 0
    if config.model.cpu_offload_gb:
        plan = plan_offload(weights, dtype, int(config.model.cpu_offload_gb * 2**30), pinned=True)
        weight_bytes, host_weight_bytes = weight_bytes - plan.freed_bytes, plan.weight_bytes
    return ModelSize(
        architecture=decoder.info.architecture,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        host_weight_bytes=host_weight_bytes,
        kv_bytes_per_token=_kv_bytes_per_token(layout, of_block),
        block_bytes=of_block,
        activation_bytes=_activation_bytes(decoder, config, dtype),
        max_model_len=longest,
        layout=layout,
        max_chunk=config.scheduler.max_num_batched_tokens,
    )


def _largest_stage(weights: WeightMap, decoder: DecoderConfig, num_stages: int) -> tuple[int, WeightMap]:
    """Return the stage with most parameters, and these."""
    stages = [(stage, weights_of_stage(weights, decoder, stage, num_stages)) for stage in range(num_stages)]
    return max(stages, key=lambda stage: count_parameters(stage[1]))


def count_parameters(weights: WeightMap) -> int:
    """Return the elements of all parameters; a tied one counts once."""
    return sum(map(num_elements, weights.values()))


def largest_batches(size: ModelSize, memory_bytes: int, utilization: float) -> dict[int, int]:
    """Return, of each of CONTEXTS that the model has, how many sequences fit at once."""
    num_blocks = size.num_blocks(memory_bytes, utilization)
    return {context: size.num_sequences(num_blocks, context) for context in contexts_of(size)}


def fewest_ranks(file: ConfigFile, config: EngineConfig, memory_bytes: int, context: int) -> tuple[int, int] | None:
    """Return the fewest cards among which tensor ranks hold a sequence of `context` tokens, and how many they hold.

    None where RANKS cards are too few, or can't divide the model.
    """
    for num_ranks in RANKS:
        try:
            size = size_config(file, replace(config, parallel=ParallelConfig(tensor_parallel_size=num_ranks)))
        except ConfigError:
            continue
        held = size.num_sequences(size.num_blocks(memory_bytes, config.cache.gpu_memory_utilization), context)
        if held:
            return num_ranks, held
    return None


def contexts_of(size: ModelSize) -> Sequence[int]:
    """Return those of CONTEXTS that a model has; its own longest where it has none of them."""
    return [context for context in CONTEXTS if context <= size.max_model_len] or [size.max_model_len]


def _kv_bytes_per_token(layout: KVLayout, of_block: int) -> float:
    return sum(of_block / group.block_size for group in layout.groups if group.spec.window is None)


def _activation_bytes(decoder: DecoderConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """The largest layer of the largest prefill, and the sampler of the largest batch, which come one after the other.

    A mixture's experts compute the tokens that chose them, of which there are `experts_per_token` for each.
    """
    experts = decoder.experts
    intermediate = decoder.intermediate_size
    if experts is not None:
        intermediate = experts.intermediate_size * experts.experts_per_token
    widest = max(3 * intermediate, decoder.query_size + 2 * decoder.kv_size)
    of_layer = config.scheduler.max_num_batched_tokens * (_LIVE_HIDDEN * decoder.hidden_size + widest) * dtype.itemsize
    of_sampler = config.scheduler.max_num_seqs * decoder.info.vocab_size * _BYTES_PER_LOGIT
    return max(of_layer, of_sampler)
