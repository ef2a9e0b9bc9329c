"""API keys: a file of their digests, and the tenants that they stand for."""

import hashlib
import hmac
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagestream_streams.tasks import Periodic

from pagestream_gateway.auth.identity import TENANT_FORM, Identity, is_tenant
from pagestream_gateway.errors import SettingsError, Unauthenticated

logger = logging.getLogger(__name__)
_RELOAD_PERIOD_S = 5.0  # one small file; a revoked key is refused within this time

_HASH = re.compile(r"[0-9a-f]{64}")
_NAME_DIGITS = 12  # of a key's SHA-256, in its name: enough to find its line in the file


class ApiKeys:
    """Maps API keys to identities by the keys' SHA-256. Keys themselves are never held."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """`tenants`: lower-case hexadecimal SHA-256 -> tenant."""
        self._identities = _by_digest(tenants)

    def replace(self, tenants: Mapping[str, str]) -> None:
        """Accept these keys from now on, and no others."""
        self._identities = _by_digest(tenants)

    def identity(self, key: str) -> Identity:
        """Return whose key this is. Raises Unauthenticated."""
        found = self.find(key)
        if found is None:
            raise Unauthenticated("the API key is not known")
        return found

    def find(self, key: str) -> Identity | None:
        """Return whose key this is, None for an unknown one."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: Identity | None = None
        for known, identity in self._identities.items():  # every key, whichever matches: the time reveals nothing
            if hmac.compare_digest(known, digest):
                found = identity
        return found


class KeyFile:
    """The file of API keys, read again when it changes: keys are made and revoked while gateways run."""

    def __init__(self, path: Path, option: str = "--api-keys") -> None:
        """Read it; errors name `option`. Raises SettingsError as `read_key_file`, and where it holds no key."""
        self._path, self._option = path, option
        self._text = _text_of(path, option)
        tenants = read_key_file(path, self._text, option)
        if not tenants:
            raise SettingsError(f"{option}: {path} holds no key; leave the option out to serve without keys")
        self.keys = ApiKeys(tenants)

    def refresh(self) -> bool:
        """Read the file; return whether it has changed. One that is wrong is logged and ignored until it changes; one
        without a key refuses every caller.
        """
        try:
            text = _text_of(self._path, self._option)
            if text == self._text:
                return False
            self._text = text
            tenants = read_key_file(self._path, text, self._option)
        except SettingsError as error:
            logger.warning("the keys stay as they were: %s", error)
            return False
        self.keys.replace(tenants)
        logger.info("loaded %d keys from %s", len(tenants), self._path)
        return True

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""

        async def work() -> None:
            self.refresh()

        return Periodic(self._option, _RELOAD_PERIOD_S, work)


def _by_digest(tenants: Mapping[str, str]) -> dict[bytes, Identity]:
    return {bytes.fromhex(digest): Identity(name, digest[:_NAME_DIGITS]) for digest, name in tenants.items()}


def _text_of(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{option}: cannot read {path}: {error}") from error


def read_key_file(path: Path, text: str | None = None, option: str = "--api-keys") -> dict[str, str]:
    """Read lines of `<sha256> -> <tenant>` (the arrow may be a blank, '#' starts a comment) or a JSON object
    {"<sha256>": "<tenant>"}. Returns hexadecimal SHA-256 -> tenant.

    `text`: what was read of the file. Raises SettingsError with the line or key that is wrong.
    """
    if text is None:
        text = _text_of(path, option)
    try:
        return _tenants(_json_pairs(path, text) if text.lstrip().startswith("{") else _line_pairs(path, text))
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from error


def _tenants(pairs: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    tenants: dict[str, str] = {}
    for place, digest, tenant in pairs:
        bare = digest.lower().removeprefix("sha256:")
        if not _HASH.fullmatch(bare):
            raise ValueError(f"{place}: expected the 64 hexadecimal digits of a key's SHA-256 (never the key itself)")
        if not is_tenant(tenant):
            raise ValueError(f"{place}: {tenant!r} is not a tenant name ({TENANT_FORM})")
        if tenants.setdefault(bare, tenant) != tenant:
            raise ValueError(f"{place}: the same key belongs to two tenants")
    return tenants


def _line_pairs(path: Path, text: str) -> list[tuple[str, str, str]]:
    pairs = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace("->", " ").split()
        if not words:
            continue
        if len(words) != 2:
            raise ValueError(f"{path}:{number}: expected '<sha256> -> <tenant>'")
        pairs.append((f"{path}:{number}", words[0], words[1]))
    return pairs


def _json_pairs(path: Path, text: str) -> list[tuple[str, str, str]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
        raise ValueError(f'{path} must be an object of "<sha256>": "<tenant>"')
    return [(f"{path}: entry {number}", key, value) for number, (key, value) in enumerate(document.items(), start=1)]
