"""The salt of a request's prefix blocks: who may see, by a count or a time, that a prompt was computed before."""

import hashlib

from pagestream.v1.records_pb2 import Adapter

from pagestream_gateway.settings import PREFIX_SHARING_ALL, CacheSettings

_SALT_BYTES = 16


def cache_salt(tenant: str, caller_salt: str, settings: CacheSettings) -> bytes:
    """Return the salt of a tenant's request; `caller_salt` is the API's field, "" for none.

    Equal at all gateways with equal settings. Empty where all tenants share and the caller gives none: as in records of
    gateways that know no salts.
    """
    if settings.prefix_sharing == PREFIX_SHARING_ALL:
        scope = "all", ""
        if not caller_salt:
            return b""
    elif tenant in settings.prefix_groups:
        scope = "group", str(settings.prefix_groups[tenant])
    else:
        scope = "tenant", tenant
    return _digest(*(part.encode() for part in (*scope, caller_salt)))


def adapted_salt(salt: bytes, adapter: Adapter | None) -> bytes:
    """Return the salt of a request with an adapter: its blocks are those of the adapter's revision alone."""
    return salt if adapter is None else _digest(b"adapter", adapter.revision.encode(), salt)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_SALT_BYTES, person=b"prefix-salt")
    for data in parts:
        digest.update(len(data).to_bytes(4, "big") + data)
    return digest.digest()
