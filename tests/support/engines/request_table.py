"""A table of active requests without an engine: it keeps the commands that an engine's thread would get.

For interleavings of claims, outputs and drops that no running engine produces at will.
"""

from __future__ import annotations

from collections.abc import Callable

from pagestream.v1.inference_pb2 import SamplingParams, TokenIds
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_engine.plan import full_attention
from pagestream_engine.wire.worker import Command
from pagestream_streams import Claim
from pagestream_streams.protocol import to_log_entry
from pagestream_telemetry import silent_telemetry
from pagestream_worker import (
    ActiveRequests,
    ClaimBudget,
    NativeLogs,
    PythonLogs,
    TokenLogs,
    WorkerTelemetry,
    load_library,
    open_logs,
)

STEP_TOKENS = 512


def native_logs(limit_bytes: int) -> NativeLogs:
    """Return the logs of an engine: in C++ where all tokens are plain. Only where `load_library` has a library."""
    library = load_library()
    if library is None:
        raise RuntimeError("the logs can't be compiled here")
    return NativeLogs(library, limit_bytes)


KINDS: list[Callable[[int], TokenLogs]] = [
    PythonLogs,
    *([native_logs] if load_library() is not None else []),
]
"""Each makes logs that hold at most so many bytes."""


class RequestTable:
    """The table with its collaborators."""

    def __init__(self, memory_bytes: int = 1_000_000, *, make_logs: Callable[[int], TokenLogs] = open_logs) -> None:
        self.logs = make_logs(memory_bytes)
        self.budget = ClaimBudget(kv_layout=full_attention(16), max_num_seqs=64, step_tokens=STEP_TOKENS)
        self.telemetry = WorkerTelemetry(silent_telemetry(), "m", "e")
        self.commands: list[Command] = []
        self.requests = ActiveRequests(self.commands.append, self.budget, self.telemetry, lambda: None, self.logs)

    def entries(self, request_id: str = "r") -> list[LogEntry]:
        """Return the entries of a request that its log lacks."""
        request = self.requests.get(request_id)
        return list(map(to_log_entry, request.pending(100).entries)) if request is not None else []


def claim(
    nonce: str, *, request_id: str = "r", prompts: int = 1, length: int = 2, num_choices: int = 1, priority: int = 0
) -> Claim:
    """Return a first claim of a request with so many choices for each prompt."""
    spec = RequestSpec(
        request_id=request_id,
        tenant="t",
        prompts=[TokenIds(ids=[1] * length)] * prompts,
        sampling=SamplingParams(n=num_choices),
        priority=priority,
    )
    return Claim(spec=spec, epoch=1, nonce=nonce, next_index=0, digest="", attempts=1, cached_tokens=0, deadline=None)
