"""Load a model by its family: configuration, weight mapping, then the layers put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagestream_engine.attention import AttentionSpec, Backend
from pagestream_engine.errors import UnsupportedOption
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.decoder_config import DecoderConfig
from pagestream_engine.models.loader import load_parameters
from pagestream_engine.models.model import Model
from pagestream_engine.models.offload.plan import plan_offload
from pagestream_engine.models.registry import BuildContext, Family, plugin_digest
from pagestream_engine.models.source import ModelSource, Target
from pagestream_engine.models.stored_size import stored_bytes


class FamilySource(ModelSource):
    """A model of a family with fused layers."""

    can_offload = True

    def __init__(self, folder: Path, file: ConfigFile, family: Family[Any]) -> None:
        """Raise ModelFileError or UnsupportedModel, as `Family.read`."""
        self._family = family
        self.plugin_digest = plugin_digest(family)
        self._config = family.read(file)
        self.routes_tokens = isinstance(self._config, DecoderConfig) and self._config.experts is not None
        super().__init__(folder, self._config.info)

    def weight_bytes(self, target: Target) -> int:
        weights = self._family.weights(self._config)
        if target.offload is not None:
            plan = plan_offload(weights, target.dtype, target.offload.max_bytes, pinned=target.device.type == "cuda")
            return stored_bytes(weights, target.dtype, None) - plan.freed_bytes
        if target.quantization is None:
            return super().weight_bytes(target)
        return stored_bytes(weights, target.dtype, target.quantization)

    def attention_specs(self, target: Target) -> Sequence[AttentionSpec]:
        return self._family.attention_specs(self._config, target.max_model_len)

    def load(self, target: Target, backend: Backend) -> Model:
        weights = self._family.weights(self._config)
        parameters = load_parameters(self.folder, weights, target)
        specs = self.attention_specs(target)
        model = self._family.build(self._config, parameters, specs, BuildContext(backend, target.max_model_len))
        if target.offload is not None and not model.computes_offloaded:
            hint = f"the family of {self.info.architecture} builds a model of its own, which needs its weights in place"
            raise UnsupportedOption("cpu_offload_gb", target.offload.max_bytes / 2**30, "0", hint)
        return model
