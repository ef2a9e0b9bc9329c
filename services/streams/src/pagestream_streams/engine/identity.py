"""An engine's identity: its id, its model, and the fingerprint of its computation."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import lru_cache

from pagestream_streams.errors import RequestNotFound
from pagestream_streams.protocol.keys import Keyspace, Partition, parse_request_id


@dataclass(frozen=True)
class EngineIdentity:
    """Constant for the life of a session."""

    engine_id: str
    """The given name and a boot nonce: an engine that restarts under its name is another engine."""
    model: str
    fingerprint: str
    """Names what decides the bits of the engine's results (model, mode, kernels, machine); "" matches any."""
    max_model_len: int
    """Longest context in tokens that the engine holds; 0 for no limit."""
    keyspace: Keyspace
    policy: str = ""
    """Its scheduling policy, by which the model's queue goes as well; "" leaves the queue as it is."""

    @classmethod
    def create(
        cls, name: str, *, model: str, fingerprint: str, max_model_len: int, keyspace: Keyspace, policy: str = ""
    ) -> EngineIdentity:
        """Add a boot nonce to a name. ValueError for a name with white space or a colon."""
        if any(character.isspace() or character == ":" for character in name):
            raise ValueError(f"expected an engine id without spaces and colons, got {name!r}")
        return cls(f"{name}:{secrets.token_hex(8)}", model, fingerprint, max_model_len, keyspace, policy)

    def partition(self, number: int) -> Partition:
        """Return a partition of the engine's model."""
        return self.keyspace.partition(self.model, number)

    def partition_of(self, request_id: str) -> Partition:
        """Return the partition that a claimed request's id names, without asking Redis, which may have lost the model.

        RequestNotFound for a malformed id.
        """
        return self.partition(_partition_number(request_id))


@lru_cache(maxsize=8192)
def _partition_number(request_id: str) -> int:
    name = parse_request_id(request_id)
    if name is None:
        raise RequestNotFound(request_id)
    return name.partition
