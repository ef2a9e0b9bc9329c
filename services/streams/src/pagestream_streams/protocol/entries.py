"""Convert log entries to append.lua's values, and from the fields of a Redis stream entry."""

from __future__ import annotations

from collections.abc import Mapping

from pagestream.v1.inference_pb2 import RequestError, TokenLogprobs, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry

from pagestream_streams.protocol.finish_reasons import finish_reason_name, parse_finish_reason

Argument = bytes | str | int

_ERROR_SEPARATOR = "\0"


def to_append_values(entry: LogEntry) -> tuple[str | bytes, ...]:
    """Return append.lua's six values for an entry. ValueError for an entry without a body."""
    if entry.HasField("token_id"):
        extra = entry.logprobs.SerializeToString() if entry.HasField("logprobs") else ""
        return "t", str(entry.choice), str(entry.token_id), entry.text, entry.digest, extra
    if entry.HasField("finish"):
        reason = finish_reason_name(entry.finish.reason)
        return "f", str(entry.choice), reason, entry.text, entry.digest, entry.finish.stop_reason
    if entry.HasField("end"):
        usage = entry.end.usage
        counts = f"{usage.prompt_tokens},{usage.completion_tokens},{usage.cached_tokens}"
        return "e", "", finish_reason_name(entry.end.reason), counts, entry.digest, error_text(entry.end)
    raise ValueError("expected a log entry with a token, a finish or the end; this one has no body")


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
    prompt, completion, cached = map(int, fields[b"u"].split(b","))
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
    end = LogEnd(reason=parse_finish_reason(fields[b"end"].decode()), usage=usage, error=_error(fields.get(b"m", b"")))
    return LogEntry(digest=digest, end=end)


def error_text(end: LogEnd) -> str:
    """Return the stored form of an end's error; "" for none."""
    return f"{end.error.code}{_ERROR_SEPARATOR}{end.error.message}" if end.HasField("error") else ""


def _error(stored: bytes) -> RequestError | None:
    if not stored:
        return None
    code, _, message = stored.decode().partition(_ERROR_SEPARATOR)
    return RequestError(code=code, message=message)
