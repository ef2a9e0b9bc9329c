"""Read a gateway's settings: from flags, then `PAGESTREAM_<GROUP>__<FIELD>`, then the defaults; and check them."""

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

from pagestream_streams import settings_from_environment
from pagestream_streams.settings import SCHEMES
from pagestream_telemetry.environment import fields_of, read_environment
from pagestream_telemetry.settings import telemetry_settings

from pagestream_gateway.errors import SettingsError
from pagestream_gateway.settings import (
    CERTIFICATES_OPTIONAL,
    CERTIFICATES_REQUIRED,
    LOCALHOST,
    OWN_GROUPS,
    PREFIX_SHARING_ALL,
    PREFIX_SHARING_TENANT,
    PRIORITIES,
    UNKNOWN_IGNORED,
    UNKNOWN_REFUSED,
    AuditSettings,
    FormatSettings,
    GatewaySettings,
    Settings,
)

_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+")


_FLAGS: Mapping[str, Mapping[str, str]] = {
    "gateway": {
        "redis": "Redis address (default {default})",
        "host": "address to bind (default {default})",
        "http_port": "OpenAI HTTP port (default {default}; 0 = a free one)",
        "grpc_port": "gRPC port (default {default}; 0 = a free one)",
        "metrics_port": "port with /metrics, /healthz and /readyz alone",
        "metrics_host": "its address (default: --host)",
        "api_keys": "file of sha256(key) -> tenant; without it no key is asked for",
        "jwt_issuers": "JSON file of the issuers whose tokens are accepted",
        "admin_keys": "file of sha256(key) -> administrator; opens /admin/v1",
        "limits": "YAML or JSON file of what tenants and keys may use",
        "tls_certificate": "PEM file; both APIs then speak TLS",
        "tls_key": "PEM file of the certificate's private key",
        "tls_client_ca": "PEM file; clients then need a certificate of these authorities",
        "id": "name of this process in Redis (default: random)",
    },
    "telemetry": {
        "otlp_endpoint": "send metrics and spans there, by OTLP/gRPC",
        "log_level": "lowest level written (default {default})",
    },
}
"""By group and field: the settings that have a flag, of the field's name and type, with its help."""
_FLAG_NAMES = {"id": "gateway_id"}


def load_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read settings from flags and environment. Raises SettingsError that names the flag or variable."""
    flags: dict[str, dict[str, Any]] = {"gateway": {}, "telemetry": {}}
    for name, value in vars(_parser().parse_args(argv)).items():
        group, _, field_name = name.partition(".")
        if value is not None:
            flags[group][field_name] = value
    environ = os.environ if environ is None else environ
    try:
        given = read_environment(environ, {group.upper(): fields_of(kind) for group, kind in OWN_GROUPS.items()})
        groups: dict[str, Any] = {
            group: kind(**given[group.upper()] | flags.get(group, {})) for group, kind in OWN_GROUPS.items()
        }
        telemetry = telemetry_settings(environ, flags["telemetry"])
        settings = Settings(**groups, telemetry=telemetry, broker=settings_from_environment(environ))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    _check(settings)
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagestream-gateway",
        description="gRPC and OpenAI HTTP in front of the durable token stream.",
        allow_abbrev=False,
    )
    defaults = Settings()
    for group, texts in _FLAGS.items():
        values = getattr(defaults, group)
        kinds = get_type_hints(type(values))
        for name, text in texts.items():
            flag = _FLAG_NAMES.get(name, name).replace("_", "-")
            kind = next((each for each in get_args(kinds[name]) if each is not NoneType), kinds[name])
            parser.add_argument(
                f"--{flag}",
                dest=f"{group}.{name}",
                type=kind,
                metavar=flag.upper().replace("-", "_"),
                help=text.format(default=getattr(values, name)),
            )
    return parser


def _check(settings: Settings) -> None:
    for name, value in dataclasses.asdict(settings.gateway).items():
        if name.endswith("_port") and value is not None and not 0 <= value <= 65535:
            flag = name.replace("_", "-")
            raise SettingsError(f"gateway.{name} (--{flag}): {value} is not a TCP port (0 to 65535)")
    _check_names(settings.gateway)
    if (settings.gateway.tls_certificate is None) != (settings.gateway.tls_key is None):
        raise SettingsError("gateway.tls_certificate (--tls-certificate) and gateway.tls_key (--tls-key) go together")
    _check_credentials(settings.gateway)
    _check_audit(settings.audit)
    scheme, separator, _ = settings.gateway.redis.partition("://")
    if f"{scheme}{separator}" not in SCHEMES:
        raise SettingsError(f"gateway.redis (--redis): expected {', '.join(SCHEMES)}..., got {scheme[:40]!r}")
    if settings.cache.prefix_sharing not in (PREFIX_SHARING_TENANT, PREFIX_SHARING_ALL):
        raise SettingsError(
            f"cache.prefix_sharing: expected {PREFIX_SHARING_TENANT!r} or {PREFIX_SHARING_ALL!r}, "
            f"got {settings.cache.prefix_sharing[:40]!r}"
        )
    for tenant, first in {"": settings.classes.first, **settings.classes.first_of}.items():
        if first not in PRIORITIES:
            name = f"classes.first_of[{tenant!r}]" if tenant else "classes.first"
            raise SettingsError(f"{name}: expected one of {', '.join(map(str, PRIORITIES))}, got {first}")
    _check_formats(settings.formats)
    if settings.gateway.metric_tenants < 0:
        raise SettingsError(f"gateway.metric_tenants: {settings.gateway.metric_tenants} must be 0 or more")
    if not settings.gateway.answer_limit_s > 0:
        raise SettingsError(f"gateway.answer_limit_s: {settings.gateway.answer_limit_s} must be above 0")
    for group in ("limits", "connections", "stream", "batches", "shutdown"):
        for name, value in dataclasses.asdict(getattr(settings, group)).items():
            if value is not None and not value > 0:
                raise SettingsError(f"{group}.{name}: {value} must be above 0")


def _check_formats(settings: FormatSettings) -> None:
    for model in {**settings.tool_call_parser_of, **settings.reasoning_parser_of}:
        if (fault := settings.parsers_of(model).fault()) is not None:
            raise SettingsError(f"formats.{fault[0]}_of[{model!r}]: {fault[1]}")


def _check_names(settings: GatewaySettings) -> None:
    if settings.unknown_fields not in (UNKNOWN_REFUSED, UNKNOWN_IGNORED):
        raise SettingsError(
            f"gateway.unknown_fields: expected {UNKNOWN_REFUSED!r} or {UNKNOWN_IGNORED!r}, "
            f"got {settings.unknown_fields[:40]!r}"
        )
    for each in settings.origins:
        if each not in (LOCALHOST, "*") and not _ORIGIN.fullmatch(each):
            raise SettingsError(
                f"gateway.cors_origins: {each!r} was given, an origin such as https://app.example.com, localhost "
                "or *, is expected"
            )
    for each in settings.hosts:
        if each != "*" and not _HOST.fullmatch(each):
            raise SettingsError(
                f"gateway.allowed_hosts: {each!r} was given, a name without scheme and port, or *, is expected"
            )


def _check_credentials(settings: GatewaySettings) -> None:
    if settings.admin_port is not None and settings.admin_keys is None:
        raise SettingsError("gateway.admin_port needs gateway.admin_keys (--admin-keys)")
    if settings.tls_client_ca is not None and settings.tls_certificate is None:
        raise SettingsError("gateway.tls_client_ca (--tls-client-ca) needs --tls-certificate and --tls-key")
    if settings.tls_client_tenants is not None and settings.tls_client_ca is None:
        raise SettingsError("gateway.tls_client_tenants needs gateway.tls_client_ca (--tls-client-ca)")
    if settings.tls_client_certificates not in (CERTIFICATES_REQUIRED, CERTIFICATES_OPTIONAL):
        raise SettingsError(
            f"gateway.tls_client_certificates: expected {CERTIFICATES_REQUIRED!r} or {CERTIFICATES_OPTIONAL!r}, "
            f"got {settings.tls_client_certificates[:40]!r}"
        )


def _check_audit(settings: AuditSettings) -> None:
    for name in ("max_file_bytes", "max_files", "max_failures_per_minute", "max_refusals_per_minute"):
        if not getattr(settings, name) > 0:
            raise SettingsError(f"audit.{name}: {getattr(settings, name)} must be above 0")
