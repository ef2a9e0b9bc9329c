"""The rolling digest of a log: equal digests mean equal tokens, choices and finish reasons up to that entry.

Of what was computed of a prompt it has how far that goes, not its numbers: as log probabilities of tokens, they differ
in their last bits between engines that are not deterministic.

SHA-1 because Redis' Lua has it and the scripts that end a request extend the chain themselves. It guards against
mix-ups, not against forgers.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha1

from pagestream.v1.records_pb2 import LogEntry

from pagestream_streams.protocol.entries import END, FINISH, PART, TOKEN
from pagestream_streams.protocol.finish_reasons import finish_reason_name

DIGEST_CHARS = 16


def chain(previous: str, entry: LogEntry) -> str:
    """Return the digest of a log with digest `previous` ("" at its start) after `entry`, as 16 hexadecimal digits."""
    choice = str(entry.choice)
    match entry.WhichOneof("body"):
        case "token_id":
            return chain_values(previous, TOKEN, choice, str(entry.token_id))
        case "finish":
            return chain_values(previous, FINISH, choice, finish_reason_name(entry.finish.reason))
        case "prompt_part":
            return chain_values(previous, PART, choice, str(entry.prompt_part.end))
        case "end":
            return chain_values(previous, END, "", finish_reason_name(entry.end.reason))
        case _:
            raise ValueError(
                "expected a log entry with a token, a finish, a prompt part or the end; this one has no body"
            )


def chain_values(previous: str, kind: str, choice: str, value: str) -> str:
    """Return the digest after an entry with these values (see EntryValues)."""
    body = f"end:{value}" if kind == END else f"c:{choice}:{kind}:{value}"
    return sha1(f"{previous}:{body}".encode(), usedforsecurity=False).hexdigest()[:DIGEST_CHARS]


def chained(previous: str, entries: Iterable[LogEntry]) -> list[LogEntry]:
    """Set the digests of consecutive entries in place, and return the entries."""
    result = []
    for entry in entries:
        previous = entry.digest = chain(previous, entry)
        result.append(entry)
    return result
