"""Which family runs which architecture."""

from __future__ import annotations

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from pagestream_engine.attention import AttentionSpec, Backend, Rotation
from pagestream_engine.errors import ConfigError
from pagestream_engine.layers.rope import Rope, cos_sin_table
from pagestream_engine.models.config import ConfigFile, ModelInfo
from pagestream_engine.models.model import Model
from pagestream_engine.models.weights import Parameters, WeightMap
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


_BUILT_IN = {
    "LlamaForCausalLM": "llama.Llama",
    "MistralForCausalLM": "mistral.Mistral",
    "MixtralForCausalLM": "mixtral.Mixtral",
    "Qwen2ForCausalLM": "qwen2.Qwen2",
    "Qwen3ForCausalLM": "qwen3.Qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe.Qwen3Moe",
    "Gemma2ForCausalLM": "gemma2.Gemma2",
    "Gemma3ForCausalLM": "gemma3.Gemma3",
    "Phi3ForCausalLM": "phi3.Phi3",
}
"""Architecture -> module and class in `models.families`, imported when a model needs it."""
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
    if architecture not in _BUILT_IN:
        return None
    module, name = _BUILT_IN[architecture].split(".")
    family: Family[Any] = getattr(import_module(f"pagestream_engine.models.families.{module}"), name)()
    return family


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
    return [*_BUILT_IN, *(name for name in _registered if name not in _BUILT_IN)]
