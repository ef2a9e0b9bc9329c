"""Which family runs which architecture, and how a model folder is loaded: by its family, or through `transformers`.

A family's load reads the configuration, maps the weights, and puts the layers together.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from pagestream_engine.attention import AttentionSpec, Backend, Rotation
from pagestream_engine.errors import ConfigError, UnsupportedModel, UnsupportedOption
from pagestream_engine.layers.rope import Rope, cos_sin_table
from pagestream_engine.models import families
from pagestream_engine.models.config import ConfigFile, ModelInfo
from pagestream_engine.models.decoder import DecoderConfig
from pagestream_engine.models.division import sharding, staging
from pagestream_engine.models.loader import by_declared_names, load_parameters, stored_bytes
from pagestream_engine.models.model import Model, ModelSource, Target
from pagestream_engine.models.nested import text_tensors
from pagestream_engine.models.offload import plan_offload
from pagestream_engine.models.pooling import CLASSIFIER, labels_of
from pagestream_engine.models.quantised.scheme import Scheme
from pagestream_engine.models.safetensors_file import Entry
from pagestream_engine.models.weights import SCORES, Parameters, TensorWeight, TiedWeight, WeightMap, check_shapes
from pagestream_engine.parallel.ranks import ONE_RANK, Ranks
from pagestream_engine.parallel.stages import ONE_STAGE, Stage


class HasInfo(Protocol):
    """A family's configuration."""

    @property
    def info(self) -> ModelInfo:
        """What does not depend on the family."""
        ...


ConfigT = TypeVar("ConfigT", bound=HasInfo)


@dataclass(frozen=True)
class BuildContext:
    """What a model is built on."""

    backend: Backend
    max_model_len: int
    """Longest sequence, in tokens."""
    ranks: Ranks = ONE_RANK
    """Among which each layer is divided."""
    stage: Stage = ONE_STAGE
    """Whose layers are built."""
    _rotations: dict[Rope, Rotation] = field(default_factory=dict)

    def rotation(self, rope: Rope) -> Rotation:
        """Return the table of a rotation; layers with equal parameters share one."""
        if rope not in self._rotations:
            table = cos_sin_table(rope, self.max_model_len, self.backend.store.device)
            self._rotations[rope] = Rotation(table, rope.interleaved)
        return self._rotations[rope]


class Family(ABC, Generic[ConfigT]):
    """Models of one architecture: how the configuration reads, how its layers attend, where the weights go, and how the
    layers are put together.

    The four are called in this order at load, the weights being read before the last.
    """

    @abstractmethod
    def read(self, file: ConfigFile) -> ConfigT:
        """Read a configuration.

        Raises:
            ModelFileError: a field is missing or malformed.
            UnsupportedModel: it asks for something that the family does not have.
        """

    @abstractmethod
    def attention_specs(self, config: ConfigT, max_model_len: int) -> Sequence[AttentionSpec]:
        """Return how each layer attends, for sequences of at most so many tokens."""

    @abstractmethod
    def weights(self, config: ConfigT) -> WeightMap:
        """Declare the parameters and what fills them."""

    @abstractmethod
    def build(
        self, config: ConfigT, parameters: Parameters, specs: Sequence[AttentionSpec], context: BuildContext
    ) -> Model:
        """Put the model together from its loaded parameters; `specs` are those of `attention_specs`."""


_CAUSAL = "ForCausalLM"
_MODULES = {each.name.replace("_", ""): each.name for each in iter_modules(families.__path__)}
"""Modules of `models.families`, each imported when a model needs it, by the architecture that it runs: in lower case,
without underscores and "ForCausalLM"."""
_registered: dict[str, Family[Any]] = {}


def register_family(architecture: str, family: Family[Any]) -> None:
    """Run an architecture by a family of one's own, in this process; it comes before a built-in one of that name.

    Call it in a module that `plugins` names: each process that loads the model imports that one.

    Args:
        architecture: as `architectures` in `config.json` names it.
        family: replaces an earlier one of the same architecture.

    Raises:
        ConfigError: it is no `Family`.
    """
    if not isinstance(family, Family):
        raise ConfigError("family", family, "an instance of a subclass of Family")
    _registered[architecture] = family


def find_family(architecture: str) -> Family[Any] | None:
    """Return the family of an architecture, None where there is none."""
    if architecture in _registered:
        return _registered[architecture]
    name = _MODULES.get(architecture.removesuffix(_CAUSAL).lower())
    built_in = None if name is None else _family_of(name)
    return built_in if built_in is not None and built_in.architecture == architecture else None


def _family_of(module: str) -> Any:
    """Return the family that a module of `models.families` defines: the one with an architecture of its own."""
    found = import_module(f"{families.__name__}.{module}")
    kinds = [each for each in vars(found).values() if isinstance(each, type) and issubclass(each, Family)]
    (kind,) = [each for each in kinds if each.__module__ == found.__name__ and "architecture" in vars(each)]
    return kind()


def plugin_digest(family: Family[Any]) -> str:
    """Return a digest of the source files of a registered family's classes; empty for one of the engine's own."""
    engine = __name__.partition(".")[0]
    modules = {kind.__module__ for kind in type(family).__mro__}
    theirs = [name for name in modules if name.partition(".")[0] not in (engine, *sys.stdlib_module_names)]
    digest = hashlib.sha256()
    for name in sorted(theirs):
        digest.update(name.encode() + b"\0" + _source(sys.modules.get(name)))
    return digest.hexdigest() if theirs else ""


def _source(module: ModuleType | None) -> bytes:
    """Return the bytes of a module's file, in a zip archive too; none of one that has no file."""
    file = getattr(module, "__file__", None)
    if file is None:
        return b""
    read: Callable[[str], bytes] | None = getattr(getattr(module, "__loader__", None), "get_data", None)
    return Path(file).read_bytes() if read is None else read(file)


def fused_architectures() -> list[str]:
    """Names of the architectures that have a family."""
    built_in = [_family_of(module).architecture for module in _MODULES.values()]
    return [*built_in, *(name for name in _registered if name not in built_in)]


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
        self._is_nested = file.outer is not None
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
        on_cpu = target.device.type == "cpu"
        return stored_bytes(weights, target.dtype, target.quantization, self._scheme, on_cpu=on_cpu)

    def check_files(self) -> None:
        entries = self.tensors()
        if self._scheme is None:  # else parts of linears are stored, under names that its reader knows
            named = by_declared_names(entries, self.weights)
            check_shapes(self.weights, {name: entry.shape for name, entry in named.items()})

    def tensors(self) -> dict[str, Entry]:
        entries = super().tensors()
        return text_tensors(entries) if self._is_nested else entries

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
        parameters = load_parameters(
            self.folder, weights, target, self._scheme, whole=self.weights, is_nested=self._is_nested
        )
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
        return self._config if size == 1 else sharding.shard_config(self._config, target.ranks.rank, size)

    def _check_divisible(self, target: Target) -> None:
        for option, size in ((sharding.OPTION, target.ranks.size), (staging.OPTION, target.stage.count)):
            if size > 1 and not isinstance(self._config, DecoderConfig):
                hint = f"the family of {self.info.architecture} has no DecoderConfig, which has what is divided"
                raise UnsupportedOption(option, size, "1", hint)


def open_model(folder: Path) -> ModelSource:
    """Read a model folder's configuration: its family's, or through `transformers` where it has none.

    Raises:
        ModelFileError: `config.json` is missing or malformed.
        UnsupportedModel: no family and no class of `transformers` runs the architecture; or it asks for something that
            is not supported.
    """
    file = ConfigFile.read(folder)
    for architecture in file.architectures:
        family = find_family(architecture)
        if family is not None:
            return FamilySource(folder, file, family)
        # `LlamaModel` is what `AutoModel` saves: Llama without a head.
        family = find_family(f"{architecture.removesuffix('Model')}ForCausalLM")
        if family is not None and architecture.endswith("Model"):
            return FamilySource(folder, file, family, is_base=True)
        # What `AutoModelForSequenceClassification` saves: the same with a matrix that makes scores of labels.
        family = find_family(f"{architecture.removesuffix(CLASSIFIER)}ForCausalLM")
        if family is not None and architecture.endswith(CLASSIFIER):
            return FamilySource(folder, file, family, is_base=True, num_labels=len(labels_of(file.fields)))
    from pagestream_engine.models.general.source import GeneralSource

    return GeneralSource(folder, file)


def read_info(folder: Path) -> ModelInfo:
    """Return what is known of a model before its weights are read; errors as `open_model`."""
    return open_model(folder).info
