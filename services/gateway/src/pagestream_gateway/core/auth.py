"""Authentication by API key."""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from pathlib import Path

from pagestream_gateway.errors import SettingsError, Unauthenticated

DEFAULT_TENANT = "default"
_HASH = re.compile(r"^[0-9a-f]{64}$")
_TENANT = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")


class Authenticator:
    """Maps API keys to tenants by the keys' SHA-256. Keys themselves are never held."""

    def __init__(self, tenants: Mapping[str, str] | None) -> None:
        """`tenants`: lower-case hexadecimal SHA-256 -> tenant; None: every caller is the default tenant."""
        self._tenants = None if tenants is None else {bytes.fromhex(digest): name for digest, name in tenants.items()}

    def tenant(self, authorization: str | None) -> str:
        """Return the tenant of an Authorization header or metadata value. Raises Unauthenticated."""
        if self._tenants is None:
            return DEFAULT_TENANT
        if not authorization:
            raise Unauthenticated("an API key is needed: send the header 'Authorization: Bearer <key>'")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("the Authorization header must be 'Bearer <key>'")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: str | None = None
        for known, name in self._tenants.items():  # every key, whichever matches, so that the time reveals nothing
            if hmac.compare_digest(known, digest):
                found = name
        if found is None:
            raise Unauthenticated("the API key is not known")
        return found


def read_key_file(path: Path) -> Authenticator:
    """Read lines of `<sha256> -> <tenant>` (the arrow may be a blank, '#' starts a comment) or a JSON object
    {"<sha256>": "<tenant>"}.

    Raises SettingsError with the line or key that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-keys: cannot read {path}: {error}") from error
    pairs = _json_pairs(path, text) if text.lstrip().startswith("{") else _line_pairs(path, text)
    tenants: dict[str, str] = {}
    for place, digest, tenant in pairs:
        bare = digest.lower().removeprefix("sha256:")
        if not _HASH.match(bare):
            raise SettingsError(
                f"--api-keys: {place}: expected the 64 hexadecimal digits of a key's SHA-256 (never the key itself)"
            )
        if not _TENANT.match(tenant):
            raise SettingsError(
                f"--api-keys: {place}: {tenant!r} is not a tenant name (letters, digits, '.', '_', '@', '-')"
            )
        if tenants.setdefault(bare, tenant) != tenant:
            raise SettingsError(f"--api-keys: {place}: the same key belongs to two tenants")
    if not tenants:
        raise SettingsError(f"--api-keys: {path} holds no key; leave the option out to serve without keys")
    return Authenticator(tenants)


def _line_pairs(path: Path, text: str) -> list[tuple[str, str, str]]:
    pairs = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace("->", " ").split()
        if not words:
            continue
        if len(words) != 2:
            raise SettingsError(f"--api-keys: {path}:{number}: expected '<sha256> -> <tenant>'")
        pairs.append((f"{path}:{number}", words[0], words[1]))
    return pairs


def _json_pairs(path: Path, text: str) -> list[tuple[str, str, str]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--api-keys: {path} is not valid JSON: {error}") from error
    if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
        raise SettingsError(f'--api-keys: {path} must be an object of "<sha256>": "<tenant>"')
    return [(f"{path}: entry {number}", key, value) for number, (key, value) in enumerate(document.items(), start=1)]
