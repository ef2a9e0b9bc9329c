"""Load a model by its family: configuration, weight mapping, then the layers put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagestream_engine.attention import AttentionSpec, Backend
from pagestream_engine.errors import UnsupportedModel, UnsupportedOption
from pagestream_engine.features.offload import plan_offload
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder_config import DecoderConfig
from pagestream_engine.models.division import sharding, staging
from pagestream_engine.models.loader import load_parameters
from pagestream_engine.models.model import Model
from pagestream_engine.models.quantised.scheme import Scheme
from pagestream_engine.models.registry import BuildContext, Family, plugin_digest
from pagestream_engine.models.safetensors_file import read_folder
from pagestream_engine.models.source import ModelSource, Target
from pagestream_engine.models.stored_size import stored_bytes
from pagestream_engine.models.weights import SCORES, TensorWeight, TiedWeight, WeightMap, check_shapes


class FamilySource(ModelSource):
    """A model of a family with fused layers."""

    can_offload = True

    def __init__(
        self, folder: Path, file: ConfigFile, family: Family[Any], *, is_base: bool = False, num_labels: int = 0
    ) -> None:
        """Raise ModelFileError or UnsupportedModel, as `Family.read`.

        Args:
            family: that runs it.
            is_base: whether the folder has no head but the embedding, which gives logits only where they are tied.
            num_labels: that the folder has a matrix of scores for; 0: it has none.
        """
        self._family = family
        self.plugin_digest = plugin_digest(family)
        self._config = family.read(file)
        self._scheme = Scheme.read(file)
        self.routes_tokens = isinstance(self._config, DecoderConfig) and self._config.experts is not None
        self.weights: WeightMap = family.weights(self._config)
        info = self._config.info
        if is_base and not isinstance(self.weights.get("head"), TiedWeight):
            self.weights = {**self.weights, "head": TiedWeight("embedding")}
            info = replace(info, has_head=False)
        self._num_labels = num_labels
        if num_labels:
            self.weights = {**self.weights, SCORES: self._score_weight(num_labels)}
            info = replace(info, has_head=False)
        super().__init__(folder, info)

    def weight_bytes(self, target: Target) -> int:
        weights = self.weights_of_rank(target)
        if target.offload is not None:
            plan = plan_offload(weights, target.dtype, target.offload.max_bytes, pinned=target.device.type == "cuda")
            return stored_bytes(weights, target.dtype, None) - plan.freed_bytes
        is_divided = target.ranks.size > 1 or target.stage.count > 1
        is_alone_on_a_gpu = is_divided and target.device.type == "cuda"
        if target.quantization is None and not is_alone_on_a_gpu:  # ranks on a CPU share its memory
            return super().weight_bytes(target)
        return stored_bytes(weights, target.dtype, target.quantization, self._scheme)

    def check_files(self) -> None:
        entries = read_folder(self.folder)
        if self._scheme is None:  # else parts of linears are stored, under names that its reader knows
            check_shapes(self.weights, {name: entry.shape for name, entry in entries.items()})

    @property
    def pooled_size(self) -> int:
        if not isinstance(self._config, DecoderConfig):
            return 0
        return self._num_labels or self._config.hidden_size

    def _score_weight(self, num_labels: int) -> TensorWeight:
        if not isinstance(self._config, DecoderConfig):
            architecture = self._config.info.architecture
            raise UnsupportedModel(f"config.json: given labels for the family of {architecture}, expected none")
        return TensorWeight.of("score.weight", num_labels, self._config.hidden_size)

    def weights_of_rank(self, target: Target) -> WeightMap:
        ranks, stage, weights = target.ranks, target.stage, self.weights
        self._check_divisible(target)
        if stage.count > 1:
            weights = staging.weights_of_stage(weights, self._config, stage.index, stage.count)
        if ranks.size > 1:
            weights = sharding.shard_weights(weights, self._config, ranks.rank, ranks.size)
        return weights

    def attention_specs(self, target: Target) -> Sequence[AttentionSpec]:
        return self._family.attention_specs(self._config_of_rank(target), target.max_model_len)

    def load(self, target: Target, backend: Backend) -> Model:
        ranks, weights = target.ranks, self.weights_of_rank(target)
        parameters = load_parameters(self.folder, weights, target, self._scheme, whole=self.weights)
        sharding.join_linears(parameters, weights, ranks, self.info.vocab_size)
        context = BuildContext(backend, target.max_model_len, ranks, target.stage)
        model = self._family.build(self._config_of_rank(target), parameters, self.attention_specs(target), context)
        if target.offload is not None and not model.computes_offloaded:
            hint = f"the family of {self.info.architecture} builds a model of its own, which needs its weights in place"
            raise UnsupportedOption("cpu_offload_gb", target.offload.max_bytes / 2**30, "0", hint)
        if target.stage.count > 1 and not model.computes_stages:
            hint = f"the family of {self.info.architecture} builds a model of its own, which needs all of its layers"
            raise UnsupportedOption(staging.OPTION, target.stage.count, "1", hint)
        return model

    def _config_of_rank(self, target: Target) -> Any:
        self._check_divisible(target)
        size = target.ranks.size
        return self._config if size == 1 else sharding.shard_config(self._config, size)

    def _check_divisible(self, target: Target) -> None:
        for option, size in ((sharding.OPTION, target.ranks.size), (staging.OPTION, target.stage.count)):
            if size > 1 and not isinstance(self._config, DecoderConfig):
                hint = f"the family of {self.info.architecture} has no DecoderConfig, which has what is divided"
                raise UnsupportedOption(option, size, "1", hint)
