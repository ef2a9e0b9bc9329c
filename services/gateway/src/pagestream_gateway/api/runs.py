"""Runs: consecutive log entries of one choice, the unit in which both APIs write an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagestream.v1.inference_pb2 import TokenLogprobs
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry


@dataclass(slots=True)
class Run:
    """One or more consecutive entries of one choice, or the log's end alone."""

    choice: int
    next_index: int
    """Index after the last entry: with `digest`, what a reader sends back to read on."""
    digest: str
    """Rolling digest after the last entry."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: ChoiceFinish | None = None
    end: LogEnd | None = None


def split_runs(first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
    """Return the runs of `entries`, whose first has index `first_index`, in order."""
    runs: list[Run] = []
    run: Run | None = None
    for index, entry in enumerate(entries, start=first_index + 1):
        kind = entry.WhichOneof("body")
        if kind == "end":
            runs.append(Run(0, index, entry.digest, end=entry.end))
            run = None
            continue
        if run is None or run.choice != entry.choice or run.finish is not None:
            run = Run(entry.choice, index, entry.digest)
            runs.append(run)
        else:
            run.next_index = index
            run.digest = entry.digest
        run.text += entry.text
        if kind == "token_id":
            run.token_ids.append(entry.token_id)
            if entry.HasField("logprobs"):
                run.logprobs.append(entry.logprobs)
        elif kind == "finish":
            run.finish = entry.finish
    return runs
