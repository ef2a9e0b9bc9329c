"""Client certificates as credentials: a file of rules maps the names in them to tenants.

The handshake has checked a certificate when it comes here: its chain, its dates, and that it is for clients.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.x509.oid import NameOID
from pagestream_streams.tasks import Periodic

from pagestream_gateway.auth.identity import TENANT_FORM, Identity, is_tenant
from pagestream_gateway.errors import SettingsError, Unauthenticated

logger = logging.getLogger(__name__)

_RELOAD_PERIOD_S = 5.0  # one small file
_MAX_FILE_BYTES = 4 * 1024 * 1024
_MAX_NAMES = 64  # of one certificate; further ones are not looked at
_FORM = "'URI:pattern -> tenant', 'DNS:pattern -> tenant' or 'CN:pattern -> tenant'"
_TENANT = "{tenant}"
_PARTS = {"URI": "[^/]+", "DNS": "[^.]+", "CN": "[^.]+"}
"""What stands for `*` and `{tenant}` in a name of each kind: one part of it."""


class _Name(NamedTuple):
    kind: str
    value: str


class _Rule(NamedTuple):
    kind: str
    pattern: re.Pattern[str]
    tenant: str

    def tenant_of(self, name: _Name) -> str | None:
        found = self.pattern.fullmatch(name.value) if name.kind == self.kind else None
        if found is None:
            return None
        return self.tenant.replace(_TENANT, found["tenant"]) if _TENANT in self.tenant else self.tenant


class CertificateRules:
    """The file of rules, read again when it changes. The first rule that fits one of a certificate's names holds."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises SettingsError with the line that is wrong, and where it holds no rule."""
        self._path = path
        self._text = _text_of(path)
        self._rules = _rules(path, self._text)

    def identity(self, pem: str) -> Identity:
        """Return whose certificate this is. Raises Unauthenticated."""
        try:
            names = _names_of(pem)
        except (ValueError, x509.ExtensionNotFound) as error:
            raise Unauthenticated("the client certificate can't be read") from error
        for rule in self._rules:
            for name in names:
                tenant = rule.tenant_of(name)
                if tenant is not None and is_tenant(tenant):
                    return Identity(tenant, f"{name.kind}:{name.value}")
        raise Unauthenticated("no tenant is known for the client certificate")

    def refresh(self) -> bool:
        """Read the file; return whether it has changed. One that is wrong is logged and ignored until it changes."""
        try:
            text = _text_of(self._path)
            if text == self._text:
                return False
            self._text = text
            self._rules = _rules(self._path, text)
        except SettingsError as error:
            logger.warning("the rules for client certificates stay as they were: %s", error)
            return False
        logger.info("loaded %d rules for client certificates from %s", len(self._rules), self._path)
        return True

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""

        async def work() -> None:
            self.refresh()

        return Periodic("client certificates", _RELOAD_PERIOD_S, work)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise SettingsError(f"gateway.tls_client_tenants: {path} has more than {_MAX_FILE_BYTES} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"gateway.tls_client_tenants: cannot read {path}: {error}") from error


def _rules(path: Path, text: str) -> Sequence[_Rule]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            try:
                found.append(_rule(stripped))
            except ValueError as error:
                raise SettingsError(f"gateway.tls_client_tenants: {path}:{number}: {error}") from error
    if not found:
        raise SettingsError(f"gateway.tls_client_tenants: {path} holds no rule; {_FORM} is expected")
    return found


def _rule(line: str) -> _Rule:
    name, arrow, tenant = (part.strip() for part in line.partition("->"))
    kind, colon, value = name.partition(":")
    if not (arrow and colon and value and tenant) or kind not in _PARTS:
        raise ValueError(f"{_FORM} is expected")
    if value.count(_TENANT) != (_TENANT in tenant):
        raise ValueError(f"{_TENANT} stands once on each side, or on none")
    if not is_tenant(tenant.replace(_TENANT, "x", 1)):
        raise ValueError(f"{tenant!r} is not a tenant name ({TENANT_FORM})")
    if kind == "DNS":
        value = "".join(piece if piece == _TENANT else piece.lower() for piece in _pieces(value))
    part = _PARTS[kind]
    special = {"*": part, _TENANT: f"(?P<tenant>{part})"}
    return _Rule(kind, re.compile("".join(special.get(each, re.escape(each)) for each in _pieces(value))), tenant)


def _pieces(value: str) -> Iterable[str]:
    return re.split(r"(\*|\{tenant\})", value)


@lru_cache(maxsize=256)
def _names_of(pem: str) -> Sequence[_Name]:
    """Return the names that rules may map: those of the extension for them, and a common name where there is one."""
    certificate = x509.load_pem_x509_certificate(pem.encode())
    names: list[_Name] = []
    try:
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        pass
    else:
        names += [_Name("URI", each) for each in others.get_values_for_type(x509.UniformResourceIdentifier)]
        names += [_Name("DNS", each.lower()) for each in others.get_values_for_type(x509.DNSName)]
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(common) == 1:
        names.append(_Name("CN", str(common[0].value)))
    return [name for name in names if name.value.isprintable()][:_MAX_NAMES]
