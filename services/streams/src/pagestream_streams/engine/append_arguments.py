"""Appends as `lua/append.lua` and wake-ups take them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pagestream.v1.records_pb2 import LogSlice

from pagestream_streams.connection import wakeups
from pagestream_streams.protocol import keys
from pagestream_streams.protocol.entries import Argument, to_values
from pagestream_streams.protocol.records import Append

_TO_JSON = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def append_arguments(retention_ms: int, appends: Sequence[Append], *, wakes: bool) -> list[Argument]:
    """The script's arguments for appends of one partition.

    `wakes`: it sends the wake-ups of first entries. Not where they have to wait for disk or replicas.
    """
    values: list[str | int] = []
    arguments: list[Argument] = [retention_ms, "", keys.wake_ups("")]
    for each in appends:
        cached = "" if each.cached_tokens is None else each.cached_tokens
        values += (each.request_id, str(each.epoch), each.nonce, each.first_index, cached, len(each.entries))
        if wakes and each.first_index == 0:
            arguments.append(wakeups.one(slice_of(each)))
            values.append(len(arguments))
        else:
            values.append("")
        for entry in each.entries:
            for value in to_values(entry):
                if isinstance(value, bytes):
                    arguments.append(value)
                    values.append(len(arguments))
                else:
                    values.append(value)
    arguments[1] = _TO_JSON(values)
    return arguments


def slice_of(append: Append) -> LogSlice:
    """What readers are told of it."""
    return LogSlice(
        request_id=append.request_id,
        first_index=append.first_index,
        entries=append.entries,
        previous_digest=append.previous_digest,
    )
