"""What can go wrong in the engine. Every error says what was given, what was expected, and what to do."""

from __future__ import annotations

DOWNLOAD_AGAIN = "download the model again"
"""What to do about a file of a model that is cut off or malformed."""


class EngineError(Exception):
    """Root of every error that the engine raises on purpose."""


class ConfigError(EngineError, ValueError):
    """An option of the engine is malformed or does not fit the model or the machine."""

    def __init__(self, field: str, given: object, expected: str, hint: str = "") -> None:
        self.field = field
        super().__init__(_sentence(field, given, expected, hint))


class UnsupportedOption(ConfigError):  # noqa: N818 - reads as what happened
    """An option is known, but this version supports only its default."""


class ModelNotFound(EngineError, FileNotFoundError):  # noqa: N818
    """There is no readable model where one was expected."""

    def __init__(self, given: str, expected: str) -> None:
        super().__init__(f"model: given {given!r}, expected {expected}")


class ModelError(EngineError, ValueError):
    """Root of the errors in the contents of a model folder."""


class ModelFolderError(ModelError):
    """A file of the model folder is missing or unreadable."""


class UnsupportedModel(ModelError):  # noqa: N818
    """The model needs something that this engine does not have; the message says what it has."""


class WeightsError(ModelError):
    """A tensor is missing, unexpected, or not of the shape that the configuration says."""


class NativeBuildError(EngineError):
    """A C++ source can't be compiled on this machine."""


class CompilerNotFound(NativeBuildError):  # noqa: N818
    """There is no C++ compiler on this machine."""


class InvariantViolation(EngineError):  # noqa: N818
    """The engine's bookkeeping contradicts itself: a bug, never the fault of a request."""


class InvalidRequest(EngineError, ValueError):  # noqa: N818
    """A request can't be run as it is. The engine is unhurt."""


class InvalidSamplingParams(InvalidRequest):
    """A sampling parameter is malformed; `field` names it."""

    def __init__(self, field: str, given: object, expected: str, hint: str = "") -> None:
        self.field = field
        super().__init__(_sentence(field, given, expected, hint))


class UnsupportedSamplingParams(InvalidSamplingParams):
    """A sampling parameter is known, but this version supports only its default."""


class PromptTooLong(InvalidRequest):
    """A prompt leaves no room for a single new token."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        super().__init__(
            f"prompt: given {num_prompt_tokens} tokens, expected at most {max_model_len - 1} "
            f"(max_model_len {max_model_len} less one new token); shorten the prompt or raise max_model_len"
        )


def _sentence(field: str, given: object, expected: str, hint: str) -> str:
    return f"{field}: given {given!r}, expected {expected}" + (f"; {hint}" if hint else "")
