"""Which way a model folder is loaded: by its family, or through `transformers` where it has none."""

from __future__ import annotations

from pathlib import Path

from pagestream_engine.features.pooling.config import CLASSIFIER, labels_of
from pagestream_engine.models.config import ConfigFile, ModelInfo
from pagestream_engine.models.family_source import FamilySource
from pagestream_engine.models.registry import find_family
from pagestream_engine.models.source import ModelSource


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
