"""What can go wrong while a model folder is read."""

from __future__ import annotations

from pagestream_engine.errors import EngineError


class ModelError(EngineError, ValueError):
    """Root of the errors of a model folder."""


class ModelFolderError(ModelError):
    """A file of the model folder is missing or unreadable."""


class UnsupportedModel(ModelError):  # noqa: N818 - reads as what happened
    """The model needs something that this engine does not have; the message says what it has."""


class WeightsError(ModelError):
    """A tensor is missing, unexpected, or not of the shape that the configuration says."""
