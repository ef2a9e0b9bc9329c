"""Log entries in three forms: the record, append.lua's values, and the fields of a Redis stream entry."""

from __future__ import annotations

from collections.abc import Mapping

from pagestream.v1.inference_pb2 import RequestError, TokenLogprobs, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, PromptPart

from pagestream_streams.protocol.finish_reasons import finish_reason_name, parse_finish_reason

Argument = bytes | str | int

EntryValues = tuple[str, str, str, str, str, str | bytes]
"""append.lua's six values for an entry: kind, choice, value, text, digest, extra.

TOKEN: the value is the token id, extra its logprobs (a TokenLogprobs, serialised; "" for none). FINISH: the value is
the reason, extra the stop reason. END: the second of the end in place of a choice ("": unknown), the value is the
reason, the text the usage, extra the error. PART: the value is the part's `end`, extra the part without it (a
PromptPart, serialised). An engine makes one for each token: a plain tuple, since a message costs three times as much.
"""

TOKEN, FINISH, END, PART = "t", "f", "e", "p"
"""Kinds of entries."""

INVALID_REQUEST = "invalid_request"
"""Code of an error for which the request itself is at fault: the same request fails again on any engine."""

_ERROR_SEPARATOR = "\0"


def to_entry_values(entry: LogEntry) -> EntryValues:
    """Return the values of an entry. ValueError for one without a body."""
    if entry.HasField("token_id"):
        extra = entry.logprobs.SerializeToString() if entry.HasField("logprobs") else ""
        return TOKEN, str(entry.choice), str(entry.token_id), entry.text, entry.digest, extra
    if entry.HasField("finish"):
        reason = finish_reason_name(entry.finish.reason)
        return FINISH, str(entry.choice), reason, entry.text, entry.digest, entry.finish.stop_reason
    if entry.HasField("end"):
        reason, usage = finish_reason_name(entry.end.reason), usage_text(entry.end.usage)
        error = error_text(entry.end.error) if entry.end.HasField("error") else ""
        return END, str(entry.end.ended_at or ""), reason, usage, entry.digest, error
    if entry.HasField("prompt_part"):
        part = PromptPart(logprobs=entry.prompt_part.logprobs, embedding=entry.prompt_part.embedding)
        return PART, str(entry.choice), str(entry.prompt_part.end), "", entry.digest, part.SerializeToString()
    raise ValueError("expected a log entry with a token, a finish, a prompt part or the end; this one has no body")


def to_log_entry(values: EntryValues) -> LogEntry:
    """Return the entry of values that `to_entry_values` or an engine made."""
    kind, choice, value, text, digest, extra = values
    if kind == TOKEN:
        entry = LogEntry(choice=int(choice), digest=digest, text=text, token_id=int(value))
        if isinstance(extra, bytes):
            entry.logprobs.MergeFromString(extra)
        return entry
    if kind == PART:
        return LogEntry(choice=int(choice), digest=digest, prompt_part=_part(value, extra))
    said = extra if isinstance(extra, str) else extra.decode()
    if kind == FINISH:
        finish = ChoiceFinish(reason=parse_finish_reason(value), stop_reason=said)
        return LogEntry(choice=int(choice), digest=digest, text=text, finish=finish)
    return LogEntry(digest=digest, end=_end(value, text, said, choice))


def from_stream_fields(fields: Mapping[bytes, bytes]) -> LogEntry:
    """Return the entry of a Redis stream entry. KeyError, ValueError or DecodeError where it can't be read."""
    digest = fields[b"d"].decode()
    token = fields.get(b"t")
    if token is not None:
        entry = LogEntry(choice=int(fields[b"c"]), digest=digest, text=fields[b"x"].decode(), token_id=int(token))
        logprobs = fields.get(b"l")
        if logprobs is not None:
            entry.logprobs.CopyFrom(TokenLogprobs.FromString(logprobs))
        return entry
    text = fields.get(b"x", b"").decode()
    if b"f" in fields:
        finish = ChoiceFinish(
            reason=parse_finish_reason(fields[b"f"].decode()), stop_reason=fields.get(b"s", b"").decode()
        )
        return LogEntry(choice=int(fields[b"c"]), digest=digest, text=text, finish=finish)
    if b"p" in fields:
        part = _part(fields[b"p"].decode(), fields[b"l"])
        return LogEntry(choice=int(fields[b"c"]), digest=digest, prompt_part=part)
    error = fields.get(b"m", b"").decode()
    ended_at = fields.get(b"a", b"").decode()
    return LogEntry(digest=digest, end=_end(fields[b"end"].decode(), fields[b"u"].decode(), error, ended_at))


def usage_text(usage: Usage) -> str:
    """Return the stored form of an end's usage."""
    return f"{usage.prompt_tokens},{usage.completion_tokens},{usage.cached_tokens}"


def error_text(error: RequestError) -> str:
    """Return the stored form of an end's error."""
    return f"{error.code}{_ERROR_SEPARATOR}{error.message}"


def _part(end: str, stored: str | bytes) -> PromptPart:
    part = PromptPart.FromString(stored if isinstance(stored, bytes) else stored.encode())
    part.end = int(end)
    return part


def _end(reason: str, usage: str, error: str, ended_at: str) -> LogEnd:
    prompt, completion, cached = map(int, usage.split(","))
    counts = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
    return LogEnd(reason=parse_finish_reason(reason), usage=counts, error=_error(error), ended_at=int(ended_at or 0))


def _error(stored: str) -> RequestError | None:
    if not stored:
        return None
    code, _, message = stored.partition(_ERROR_SEPARATOR)
    return RequestError(code=code, message=message)
