"""The file of limits: what each tenant and each credential may use, and which models; and metrics of that use.

The first tenants have series of their own; all others share one.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pagestream_streams.limits import EndedRequest
from pagestream_streams.rates import NAMES, NO_LIMITS, Limits
from pagestream_streams.tasks import Periodic
from pagestream_telemetry import catalog
from pagestream_telemetry.instruments import Registry

from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.errors import SettingsError

logger = logging.getLogger(__name__)
_RELOAD_PERIOD_S = 5.0
_OPTION = "--limits"
_MODELS = "models"
_MOST = 2**48  # sums in Redis' Lua stay exact


@dataclass(frozen=True)
class Rule:
    """What one tenant, or one credential, may use."""

    limits: Limits = NO_LIMITS
    models: tuple[str, ...] | None = None
    """Patterns of names, as of a shell; None: all models."""

    def allows(self, model: str) -> bool:
        """Return whether the model, or adapter, of this name may be used."""
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)


@dataclass(frozen=True)
class Rules:
    """A file's content."""

    default: Rule = field(default_factory=Rule)
    """Of tenants without an entry."""
    tenants: Mapping[str, Rule] = field(default_factory=dict)
    keys: Mapping[str, Rule] = field(default_factory=dict)
    """Of credentials, by the names that they have in the audit log. Without an entry they have no limits of their own.
    """


NO_RULES = Rules()
"""Nothing is limited."""


class TenantLimits:
    """The limits of all callers. A source of the limits that a gateway's session enforces (`LimitSource`)."""

    def __init__(self, rules: Rules | None = None) -> None:
        """Without rules nothing is limited."""
        self.rules = rules or NO_RULES

    def of(self, tenant: str, credential: str) -> tuple[Limits, Limits]:
        """Return the limits of a tenant, and those of one of its credentials."""
        own = self.rules.keys.get(credential)
        return self.rules.tenants.get(tenant, self.rules.default).limits, NO_LIMITS if own is None else own.limits

    def allows(self, identity: Identity, model: str) -> bool:
        """Return whether a caller may use the model, or adapter, of this name."""
        own = self.rules.keys.get(identity.key)
        tenants = self.rules.tenants.get(identity.tenant, self.rules.default)
        return tenants.allows(model) and (own is None or own.allows(model))


class LimitFile:
    """The file, read again when it changes. One that is wrong leaves the limits as they were."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises SettingsError that names what is wrong."""
        self._path = path
        self._text = _text_of(path)
        self.limits = TenantLimits(parse_rules(path, self._text))

    def refresh(self) -> bool:
        """Read the file; return whether it has changed. One that is wrong is logged and ignored until it changes."""
        try:
            text = _text_of(self._path)
            if text == self._text:
                return False
            self._text = text
            rules = parse_rules(self._path, text)
        except SettingsError as error:
            logger.warning("the limits stay as they were: %s", error)
            return False
        self.limits.rules = rules
        logger.info("loaded the limits of %d tenants and %d keys", len(rules.tenants), len(rules.keys))
        return True

    async def reload(self) -> bool:
        """Do what `refresh` does."""
        return self.refresh()

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""

        async def work() -> None:
            self.refresh()

        return Periodic(_OPTION, _RELOAD_PERIOD_S, work)


def parse_rules(path: Path, text: str) -> Rules:
    """Read a file of YAML, or JSON: `default`, `tenants` and `keys`. Raises SettingsError that names the field.

    A tenant's entry has the default's value of what it leaves out; null is no limit.
    """
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"{_OPTION}: {path} is neither YAML nor JSON: {error}") from error
    document = {} if document is None else document
    where = str(path)
    _check_names(document, ("default", "tenants", "keys"), where)
    default = _rule(document.get("default"), Rule(), f"{where}: default")
    return Rules(
        default,
        _rules(document.get("tenants"), default, f"{where}: tenants"),
        _rules(document.get("keys"), Rule(), f"{where}: keys"),
    )


def _rules(given: Any, default: Rule, where: str) -> dict[str, Rule]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise _wrong(where, given, "an object of names and their limits")
    for name in given:
        if not isinstance(name, str):
            raise _wrong(where, name, "a name as text: put it in quotes")
    return {name: _rule(entry, default, f"{where}.{name}") for name, entry in given.items()}


def _rule(given: Any, default: Rule, where: str) -> Rule:
    if given is None:
        return default
    _check_names(given, (*NAMES, _MODELS), where)
    values: dict[str, int] = {}
    for name in NAMES:
        value = given.get(name, getattr(default.limits, name) or None)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST):
            raise _wrong(f"{where}.{name}", value, "a whole number from 1 on, or null for no limit")
        values[name] = value or 0
    return Rule(replace(NO_LIMITS, **values), _patterns(given.get(_MODELS, default.models), f"{where}.{_MODELS}"))


def _patterns(given: Any, where: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise _wrong(where, given, "a list of names or patterns such as llama-*, or null for all models")
    return tuple(given)


def _check_names(given: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(given, dict):
        raise _wrong(where, given, "an object")
    for name in given:
        if name not in known:
            raise SettingsError(f"{_OPTION}: {where}.{name}: is not known; expected one of {', '.join(known)}")


def _wrong(where: str, given: Any, expected: str) -> SettingsError:
    return SettingsError(f"{_OPTION}: {where}: expected {expected}, got {json.dumps(given, default=str)[:100]}")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{_OPTION}: cannot read {path}: {error}") from error


OTHERS = "(others)"


class TenantMetrics:
    """The counters of one gateway: those of all gateways add up to what was used."""

    def __init__(self, registry: Registry, most: int) -> None:
        """`most`: tenants with series of their own."""
        self._most = most
        self._named: set[str] = set()
        self._requests = registry.number(catalog.TENANT_REQUESTS)
        self._tokens = registry.number(catalog.TENANT_TOKENS)
        self._refusals = registry.number(catalog.TENANT_REFUSALS)

    def ended(self, ends: Sequence[EndedRequest]) -> None:
        """Count ended requests."""
        for each in ends:
            name = self._name(each.tenant)
            self._requests.series(name).add(each.requests)
            for kind, number in (
                ("prompt", each.prompt_tokens),
                ("cached", each.cached_tokens),
                ("output", each.output_tokens),
            ):
                self._tokens.series(name, kind).add(number)

    def refused(self, tenant: str, limit: str) -> None:
        """Count a request that a limit has refused."""
        self._refusals.series(self._name(tenant), limit).add()

    def _name(self, tenant: str) -> str:
        if tenant not in self._named:
            if len(self._named) >= self._most:
                return OTHERS
            self._named.add(tenant)
        return tenant
