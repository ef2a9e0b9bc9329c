"""The stored form: ids, keys, records, log entries, digests and partitions.

Names are imported when they are used: ids and keys can be read without protobuf.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_streams.protocol.adapter_files import check_adapter_files
    from pagestream_streams.protocol.claimed_log import ClaimedLog
    from pagestream_streams.protocol.digests import chain, chain_values, chained
    from pagestream_streams.protocol.entries import from_stream_fields, to_entry_values, to_log_entry
    from pagestream_streams.protocol.finish_reasons import FINISH_REASONS, finish_reason_name, parse_finish_reason
    from pagestream_streams.protocol.ids import MAX_PARTITIONS, model_tag, new_request_id, parse_request_id
    from pagestream_streams.protocol.keys import Keyspace, Partition, tenant_tag
    from pagestream_streams.protocol.placement import ownership, partitions_of
    from pagestream_streams.protocol.prefixes import prefixes_of
    from pagestream_streams.protocol.records import most_output_tokens, output_bounds
    from pagestream_streams.protocol.token_appends import TokenAppends

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
    "check_adapter_files",
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

_LIGHT = ("ids", "keys", "placement", "prefixes", "adapter_files")
_OF_PROTOBUF = ("finish_reasons", "entries", "digests", "claimed_log", "records", "token_appends")


def __getattr__(name: str) -> object:
    if name in __all__:
        for each in (*_LIGHT, *_OF_PROTOBUF):
            module = import_module(f"{__name__}.{each}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
