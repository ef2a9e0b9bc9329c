"""What is wrong with an option or a parameter. Every error says what was given, what was expected, and what to do."""

from __future__ import annotations


class EngineError(Exception):
    """Root of every error that the engine raises on purpose. It can be pickled, whatever its constructor takes."""

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[EngineError], arguments: tuple[object, ...], state: dict[str, object]) -> EngineError:
    # MemoryError has a `__new__` of its own, which refuses subclasses that have another base before it.
    error = Exception.__new__(kind, *arguments) if issubclass(kind, MemoryError) else kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return error


class ConfigError(EngineError, ValueError):
    """An option of the engine is malformed or does not fit the model or the machine."""

    def __init__(self, field: str, given: object, expected: str, hint: str = "") -> None:
        self.field = field
        super().__init__(_sentence(field, given, expected, hint))


class UnsupportedOption(ConfigError):  # noqa: N818 - reads as what happened
    """An option is known, but this version supports only its default."""


class InvalidRequest(EngineError, ValueError):  # noqa: N818
    """A request can't be run as it is. The engine is unhurt."""


class InvalidSamplingParams(InvalidRequest):
    """A sampling parameter is malformed; `field` names it."""

    def __init__(self, field: str, given: object, expected: str, hint: str = "") -> None:
        self.field = field
        super().__init__(_sentence(field, given, expected, hint))


class UnsupportedSamplingParams(InvalidSamplingParams):
    """A sampling parameter is known, but this version supports only its default."""


def _sentence(field: str, given: object, expected: str, hint: str) -> str:
    return f"{field}: given {given!r}, expected {expected}" + (f"; {hint}" if hint else "")
