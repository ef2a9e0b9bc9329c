"""Runs: consecutive log entries of one choice, the unit in which both APIs write an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagestream.v1.inference_pb2 import TokenLogprobs
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry


@dataclass(slots=True)
class Run:
    """One or more consecutive entries of one choice, or the log's end alone; prompt parts stand apart from tokens."""

    choice: int
    next_index: int
    """Index after the last entry: with `digest`, what a reader sends back to read on."""
    digest: str
    """Rolling digest after the last entry."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of tokens of the prompt, which is that of the choices from `choice` on. Such a run has no tokens."""
    prompt_end: int = 0
    """How many of the prompt's log probabilities there are up to and including these."""
    embedding: bytes = b""
    """The vector of the choice's prompt: float32 numbers in little-endian order. Such a run has no tokens."""
    finish: ChoiceFinish | None = None
    end: LogEnd | None = None


def split_runs(first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
    """Return the runs of `entries`, whose first has index `first_index`, in order."""
    if len(entries) == 1 and (entry := entries[0]).HasField("token_id") and not entry.HasField("logprobs"):
        return [Run(entry.choice, first_index + 1, entry.digest, entry.text, [entry.token_id])]  # nearly every one
    runs: list[Run] = []
    run: Run | None = None
    for index, entry in enumerate(entries, start=first_index + 1):
        kind = entry.WhichOneof("body")
        if kind == "end":
            runs.append(Run(0, index, entry.digest, end=entry.end))
            run = None
            continue
        if run is None or run.choice != entry.choice or run.finish is not None or _parts(run, kind):
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
        elif kind == "prompt_part":
            run.prompt_logprobs.extend(entry.prompt_part.logprobs)
            run.prompt_end = entry.prompt_part.end
            run.embedding = entry.prompt_part.embedding
    return runs


def _parts(run: Run, kind: str | None) -> bool:
    """Whether an entry is a prompt part and the run's entries are not, or the other way round."""
    return (kind == "prompt_part") != bool(run.prompt_end)
