"""Divide a decoder's layers among the stages of a pipeline: what each stage reads."""

from __future__ import annotations

from pagestream_engine.errors import ConfigError, UnsupportedOption
from pagestream_engine.models.decoder import DecoderConfig
from pagestream_engine.models.weights import BIAS, SCORES, Part, TiedWeight, Weight, WeightMap
from pagestream_engine.parallel.rank import layers_of_stage

OPTION = "pipeline_parallel_size"
_EMBEDDING, _ENTRY, _LAST = "embedding", ("positions", "entry_norm"), ("norm", "head", SCORES)


def layers_of(config: DecoderConfig, stage: int, num_stages: int) -> range:
    """Return the layers of a stage.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if num_stages > len(config.layers):
        raise ConfigError(OPTION, num_stages, f"at most the {len(config.layers)} layers of the model")
    return layers_of_stage(len(config.layers), stage, num_stages)


def weights_of_stage(weights: WeightMap, config: DecoderConfig, stage: int, num_stages: int) -> WeightMap:
    """Return what a stage reads: its layers, the first one the embedding, the last one norm, head and scores. A head
    that is tied to the embedding needs that, too.

    Raises:
        ConfigError: there are more stages than layers.
        UnsupportedOption: a family declares a parameter of which it can't be told where it belongs.
    """
    if num_stages == 1:
        return weights
    layers, is_first, is_last = layers_of(config, stage, num_stages), stage == 0, stage == num_stages - 1
    is_tied = any(isinstance(weight, TiedWeight) for weight in weights.values())

    def is_own(name: str) -> bool:
        layer, name = name.partition(".")[0], name.removesuffix(BIAS)
        if layer.isdecimal():
            return int(layer) in layers
        if name == _EMBEDDING:
            return is_first or (is_last and is_tied)
        if name in _ENTRY:
            return is_first
        if name in _LAST:
            return is_last
        hint = f"{config.info.architecture} declares {name}, of which it can't be told which stage has it"
        raise UnsupportedOption(OPTION, num_stages, "1", hint)

    return {name: weight for name, weight in weights.items() if is_own(name)}


def part_names(weights: WeightMap) -> set[str]:
    """Return the names in a checkpoint of all that fills some parameters."""
    return {part.name for weight in weights.values() for part in _parts(weight)}


def _parts(weight: Weight) -> tuple[Part, ...]:
    return () if isinstance(weight, TiedWeight) else weight.parts
