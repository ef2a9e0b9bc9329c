"""What can go wrong in the engine. Every error says what was given, what was expected, and what to do."""

from __future__ import annotations

from pagestream_options.errors import (
    ConfigError,
    EngineError,
    InvalidRequest,
    InvalidSamplingParams,
    UnsupportedOption,
    UnsupportedSamplingParams,
)

__all__ = [
    "DOWNLOAD_AGAIN",
    "AdapterChanged",
    "AdapterError",
    "AdapterFileError",
    "AdapterMismatch",
    "CompilerNotFound",
    "ConfigError",
    "EngineAsleep",
    "EngineError",
    "ExecutorDied",
    "ExecutorError",
    "InvalidRequest",
    "InvalidSamplingParams",
    "InvariantViolation",
    "MessageError",
    "ModelError",
    "ModelFileError",
    "ModelNotFound",
    "ModelTooLarge",
    "NativeBuildError",
    "NodeError",
    "NodeProtocolError",
    "NodeRefused",
    "NodesMissing",
    "OutOfMemory",
    "PromptTooLong",
    "RankLost",
    "RequestFault",
    "SleepFailed",
    "UnsupportedAdapter",
    "UnsupportedModel",
    "UnsupportedOption",
    "UnsupportedSamplingParams",
    "WeightsError",
]

DOWNLOAD_AGAIN = "download the model again"
"""What to do about a file of a model that is cut off or malformed."""


class ExecutorError(EngineError, RuntimeError):
    """A step, or the loading of a model, failed in the executor's process with an error that can't be sent."""


class ExecutorDied(EngineError, RuntimeError):  # noqa: N818
    """The executor's process has ended. Its KV cache is lost; requests can be run again on a new executor."""

    def __init__(self, exit_code: int | None) -> None:
        """`exit_code` is the process's; minus the number of the signal that killed it."""
        self.exit_code = exit_code
        how = (
            f"was killed by signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exited: {exit_code}"
        )
        super().__init__(f"the executor's process {how}; restart_executor() starts another")


class RankLost(ExecutorDied):
    """A rank of a group has died, hangs, or failed alone; the others were ended with it."""

    def __init__(
        self, rank: int, size: int, how: str, exit_code: int | None = None, *, is_link_lost: bool = False
    ) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.is_link_lost = is_link_lost
        """Whether a machine fell silent: no request that its ranks ran can be the cause."""
        RuntimeError.__init__(
            self, f"rank {rank} of {size} {how}, and the others were ended; restart_executor() starts another group"
        )


class MessageError(EngineError, ValueError):
    """A message between processes of an engine can't be sent, or what came is none."""


class NodeError(EngineError, RuntimeError):
    """Root of the errors between the machines of one group of ranks."""


class NodeProtocolError(NodeError):
    """The other side of a connection sent what no rank of the group sends."""


class NodeRefused(NodeError):  # noqa: N818 - reads as what happened
    """A rank may not join: the reason is the leader's, or that the other side is not its leader."""


class NodesMissing(NodeError):  # noqa: N818 - likewise
    """A group did not form within its limit."""


class OutOfMemory(EngineError, MemoryError):  # noqa: N818
    """A step needs more memory than there is. Smaller steps may fit."""


class ModelNotFound(EngineError, FileNotFoundError):  # noqa: N818
    """There is neither a model folder nor a repository of this name."""

    def __init__(self, given: str, expected: str) -> None:
        super().__init__(f"model: given {given!r}, expected {expected}")


class ModelError(EngineError, ValueError):
    """Root of the errors in what a model is made of; `ModelNotFound` is raised where there is no model."""


class ModelFileError(ModelError):
    """A file of the model's folder is missing, unreadable or malformed."""


class UnsupportedModel(ModelError):  # noqa: N818
    """The model needs something that this engine does not have; the message says what it has."""


class WeightsError(ModelError):
    """A tensor is missing, unexpected, or not of the dtype or shape that the configuration says."""


class ModelTooLarge(ModelError):  # noqa: N818
    """The weights do not fit into the memory that is free."""

    def __init__(self, num_bytes: int, free_bytes: int, device: str) -> None:
        super().__init__(
            f"model: given {_gib(num_bytes)} of weights, expected at most {_gib(free_bytes)}, which is free on "
            f"{device}; free memory, choose a smaller model or, for one in float32, dtype bfloat16"
        )


class AdapterError(EngineError, ValueError):
    """Root of the errors in a LoRA adapter. It concerns those alone who name that adapter."""


class AdapterFileError(AdapterError):
    """A file of an adapter is missing, unreadable or malformed."""


class UnsupportedAdapter(AdapterError):  # noqa: N818
    """An adapter has something that this engine does not support; the message names it."""


class AdapterMismatch(AdapterError):  # noqa: N818
    """An adapter was trained for another model."""


class AdapterChanged(AdapterError):  # noqa: N818
    """The files of an adapter are not those that a request was accepted for: its tokens would be others."""

    def __init__(self, name: str, expected: str, found: str) -> None:
        super().__init__(
            f"adapter {name}: given files of revision {found}, expected {expected}, by which the request began; "
            "restore them, or load the changed adapter anew and send the request again"
        )


class NativeBuildError(EngineError):
    """A C++ source can't be compiled on this machine."""


class CompilerNotFound(NativeBuildError):  # noqa: N818
    """There is no C++ compiler on this machine."""


class EngineAsleep(EngineError, RuntimeError):  # noqa: N818
    """An engine that sleeps was to run something."""


class SleepFailed(EngineError, RuntimeError):  # noqa: N818
    """The executor could not go to sleep, or wake up. It is of no use then."""


class InvariantViolation(EngineError):  # noqa: N818
    """The engine's bookkeeping contradicts itself: a bug, never the fault of a request."""


class RequestFault(str):
    """The error text of a sequence whose own request is at fault, as a grammar that needs too much is."""

    __slots__ = ()


class PromptTooLong(InvalidRequest):
    """A prompt leaves no room for a single new token."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        super().__init__(
            f"prompt: given {num_prompt_tokens} tokens, expected at most {max_model_len - 1} "
            f"(max_model_len {max_model_len} less one new token); shorten the prompt or raise max_model_len"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


_CPU_FAILURE = "DefaultCPUAllocator"
"""Names the allocator in the RuntimeError that torch raises where a CPU has no memory left."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a GPU or of the host has run out, as Python and torch say it."""
    is_torchs = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return isinstance(error, MemoryError) or is_torchs or _CPU_FAILURE in str(error)
