"""Issuers of JSON Web Tokens that are trusted: a file that says how to check their tokens, and what claims mean."""

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pagestream_gateway.core.identities.identity import TENANT_FORM, is_tenant
from pagestream_gateway.errors import SettingsError
from pagestream_gateway.settings import PRIORITIES

_MAX_FILE_BYTES = 1024 * 1024
_LAST_CLASS = PRIORITIES[-1]

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Asymmetric ones alone: with a symmetric one who can check a token can make it."""
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Scalar = bool | int | float | Text


class Issuer(BaseModel):
    """One issuer. Claims are named by their paths: "tenant", "realm.roles"; a claim's own name may have dots."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    issuer: Text
    """What `iss` has to be, exactly."""
    audiences: Annotated[list[Text], Field(min_length=1, max_length=64)]
    """`aud` has to name one of these."""
    jwks_url: Text | None = None
    """Where its public keys are: https, or http on this machine."""
    jwks_ca: Text | None = None
    """PEM file of the authorities that may vouch for that address; None: those of the system."""
    jwks_file: Text | None = None
    """Or a file that holds them, read again when it changes."""
    algorithms: Annotated[list[Algorithm], Field(min_length=1)] = ["RS256", "PS256", "ES256", "EdDSA"]
    tenant_claim: Text
    """The claim that names the tenant; a text."""
    tenants: Annotated[dict[str, str], Field(max_length=100_000)] | None = None
    """What that claim's values stand for; tokens with another value are refused. None: the value is the tenant."""
    tenant_prefix: Annotated[str, Field(max_length=64)] = ""
    """Before each tenant's name, so that two issuers can't name one tenant."""
    class_claim: Text | None = None
    """The claim that gives the best priority class: a text or a list of such. None: tokens set no bound."""
    classes: dict[str, int] = Field(default_factory=dict)
    """What that claim's values stand for; the best of a list counts."""
    default_class: int = _LAST_CLASS
    """The class of a token without such a value."""
    required_claims: dict[str, Scalar | list[Scalar]] = Field(default_factory=dict)
    """Claims that a token must have: the value, or one of several; of a claim that is a list one item has to be so."""
    leeway_s: Annotated[float, Field(ge=0, le=300)] = 30.0
    """Seconds by which the issuer's clock may differ from this machine's."""

    @model_validator(mode="after")
    def _check(self) -> "Issuer":
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise ValueError("give either jwks_url or jwks_file")
        if self.jwks_url is not None and not _is_safe(self.jwks_url):
            raise ValueError("jwks_url must be https://..., or http:// on a loopback address, without a password")
        if self.jwks_ca is not None and self.jwks_url is None:
            raise ValueError("jwks_ca goes with jwks_url")
        for tenant in (self.tenants or {}).values():
            if not is_tenant(self.tenant_prefix + tenant):
                raise ValueError(f"tenants: {tenant!r} is not a tenant name ({TENANT_FORM})")
        if self.tenant_prefix and not is_tenant(self.tenant_prefix):
            raise ValueError(f"tenant_prefix: {self.tenant_prefix!r} can't begin a tenant name ({TENANT_FORM})")
        for number in (self.default_class, *self.classes.values()):
            if number not in PRIORITIES:
                raise ValueError(f"classes: one of {', '.join(map(str, PRIORITIES))} is expected, got {number}")
        if self.classes and self.class_claim is None:
            raise ValueError("classes goes with class_claim")
        return self


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    issuers: Annotated[list[Issuer], Field(min_length=1, max_length=64)]


def read_issuers(path: Path) -> Sequence[Issuer]:
    """Read {"issuers": [...]} from a JSON file. Raises SettingsError with the field that is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"--jwt-issuers: cannot read {path}: {error}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise SettingsError(f"--jwt-issuers: {path} has {len(data)} bytes, at most {_MAX_FILE_BYTES} are read")
    try:
        issuers = _Document.model_validate_json(data).issuers
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise SettingsError(f"--jwt-issuers: {path}: {place}: {first['msg']}") from error
    names = [each.issuer for each in issuers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(f"--jwt-issuers: {path}: the issuer {twice!r} is there twice")
    return issuers


def claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return the claim at a path, None where there is none. A name that has dots itself goes before a nested one."""
    if path in claims:
        return claims[path]
    for end in range(len(path) - 1, 0, -1):
        inner = claims.get(path[:end]) if path[end] == "." else None
        if isinstance(inner, Mapping) and (found := claim(inner, path[end + 1 :])) is not None:
            return found
    return None


def _is_safe(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        has_password = parts.username is not None or parts.password is not None
    except ValueError:
        return False
    if has_password or parts.scheme not in ("http", "https"):
        return False  # the address is logged
    if parts.scheme == "https":
        return bool(host)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
