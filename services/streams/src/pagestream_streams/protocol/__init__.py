"""The stored form: ids, keys, records, log entries, digests and partitions.

Names are imported when they are used: ids and keys can be read without protobuf.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_streams.protocol.keys import (
        MAX_PARTITIONS,
        Keyspace,
        Partition,
        model_tag,
        new_request_id,
        ownership,
        parse_request_id,
        partitions_of,
        prefixes_of,
        tenant_tag,
    )
    from pagestream_streams.protocol.records import (
        FINISH_REASONS,
        ClaimedLog,
        TokenAppends,
        chain,
        chain_values,
        chained,
        finish_reason_name,
        from_stream_fields,
        most_output_tokens,
        output_bounds,
        parse_finish_reason,
        to_entry_values,
        to_log_entry,
    )

__all__ = [
    "FINISH_REASONS",
    "MAX_PARTITIONS",
    "ClaimedLog",
    "Keyspace",
    "Partition",
    "TokenAppends",
    "chain",
    "chain_values",
    "chained",
    "finish_reason_name",
    "from_stream_fields",
    "model_tag",
    "most_output_tokens",
    "new_request_id",
    "output_bounds",
    "ownership",
    "parse_finish_reason",
    "parse_request_id",
    "partitions_of",
    "prefixes_of",
    "tenant_tag",
    "to_entry_values",
    "to_log_entry",
]

_MODULES = ("keys", "records")


def __getattr__(name: str) -> object:
    if name in __all__:
        for each in _MODULES:
            module = import_module(f"{__name__}.{each}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
