"""Answers as they are compared: the contents of a log, choice by choice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream.v1.records_pb2 import LogEntry, RequestSpec

CUT_SHORT = ("cancelled", "deadline", "error")
"""Finish reasons that do not follow from the tokens: generated again, the choice would continue."""


@dataclass
class Answer:
    """One choice of an answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    """Empty where the request ended before the choice did."""
    stop_reason: str = ""
    logprobs: list[float] = field(default_factory=list)
    """Of each chosen token, where they were asked for."""

    @property
    def is_cut_short(self) -> bool:
        """Whether it ended for a reason other than its tokens."""
        return self.finish_reason in ("", *CUT_SHORT)


def read_log(spec: RequestSpec, entries: Iterable[LogEntry]) -> list[Answer]:
    """Return the choices in a request's log, by number."""
    from pagestream_streams.protocol.records import finish_reason_name

    answers = [Answer() for _ in range(len(spec.prompts) * max(1, spec.sampling.n))]
    for entry in entries:
        answer = answers[entry.choice]
        match entry.WhichOneof("body"):
            case "token_id":
                answer.token_ids.append(entry.token_id)
                if entry.logprobs.entries:
                    answer.logprobs.append(entry.logprobs.entries[0].logprob)
            case "finish":
                answer.finish_reason = finish_reason_name(entry.finish.reason)
                answer.stop_reason = entry.finish.stop_reason
            case _:
                continue
        answer.text += entry.text
    return answers
