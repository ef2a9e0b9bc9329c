"""What a gateway process is started with: flags, then `PAGESTREAM_<GROUP>__<FIELD>`, then the defaults here."""

import argparse
import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagestream_streams import StreamsSettings, settings_from_environment
from pagestream_streams.links import SCHEMES

from pagestream_gateway.errors import SettingsError

ENV_PREFIX = "PAGESTREAM_"


@dataclass(frozen=True)
class GatewaySettings:
    """Who this process is."""

    id: str | None = None
    """Name under which engines wake this process up; a random one unless given."""


@dataclass(frozen=True)
class ListenSettings:
    """Where clients reach this process."""

    host: str = "127.0.0.1"
    """Address to bind. Loopback unless told otherwise, since API keys are optional."""
    http_port: int = 8000
    """TCP port of the OpenAI HTTP API; 0 takes a free one."""
    grpc_port: int = 50051
    """TCP port of the gRPC API; 0 takes a free one."""
    metrics_port: int | None = None
    """A second TCP port that serves only /metrics, /healthz and /readyz. They are on the HTTP port in any case."""


@dataclass(frozen=True)
class RedisSettings:
    """Where requests and token logs live."""

    url: str = "redis://127.0.0.1:6379"
    """Address: redis://, rediss:// (TLS), unix://, redis+sentinel:// or redis+cluster://; see docs/durability.md."""
    answer_limit_s: float = 8.0
    """Seconds that a call may wait for Redis before the client hears UNAVAILABLE: a client can retry, a hanging call
    can't. Above the 5 s after which a single command counts as lost: a burst of calls waits for connections as well.
    """


@dataclass(frozen=True)
class AuthSettings:
    """Who may call."""

    api_keys: Path | None = None
    """File of `sha256 of the key -> tenant`. None: everybody is the tenant "default"."""


@dataclass(frozen=True)
class LimitSettings:
    """Bounds on what one request or one process may take."""

    max_body_bytes: int = 8 * 1024 * 1024
    """Bytes of a request. Four bytes a token make this two million tokens, more than any context here."""
    max_prompts: int = 128
    """Prompts of one completions request."""
    max_n: int = 128
    """Choices for each prompt, as in OpenAI's API."""
    max_choices: int = 256
    """Prompts times n: one request is one unit of scheduling and of recovery, so it stays small."""
    max_stop: int = 64
    """Stop strings; each is searched for in each token's text."""
    max_stop_chars: int = 1024
    """Characters of one stop string; this much text is held back while it may still match."""
    max_stop_token_ids: int = 1024
    """Stop token ids."""
    max_logprobs: int = 20
    """Likeliest tokens shown at each position, as in OpenAI's API; each is an entry of the log."""
    max_logit_bias: int = 1024
    """Tokens with a bias."""
    max_id_chars: int = 512
    """Characters of names that callers choose: their own request id, the idempotency key."""
    tokenize_workers: int = 2
    """Threads that render and tokenize; the tokenizer works outside Python's lock."""
    tokenize_queue: int = 512
    """Prompts that may wait for a thread before callers hear RESOURCE_EXHAUSTED."""
    tokenize_limit_s: float = 30.0
    """Seconds that rendering and tokenizing one request may take."""


@dataclass(frozen=True)
class StreamSettings:
    """How answers are streamed."""

    keep_alive_s: float = 15.0
    """Seconds of silence after which an SSE comment is sent: proxies drop connections that are silent for 30 s to 60
    s.
    """
    disconnect_grace_s: float = 10.0
    """Seconds without a reader after which a request is cancelled, unless it asked to go on."""


@dataclass(frozen=True)
class ShutdownSettings:
    """How the process ends on SIGTERM or SIGINT."""

    drain_s: float = 2.0
    """Seconds that open streams get to finish by themselves. The rest is told to resume on another gateway."""
    close_limit_s: float = 5.0
    """Seconds for each of: closing servers, closing the registration in Redis."""


@dataclass(frozen=True)
class LogSettings:
    """What is written to stderr."""

    level: str = "INFO"
    """Lowest level that is written: DEBUG, INFO, WARNING or ERROR."""


@dataclass(frozen=True)
class Settings:
    """All settings of a gateway process, in groups."""

    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    listen: ListenSettings = field(default_factory=ListenSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    shutdown: ShutdownSettings = field(default_factory=ShutdownSettings)
    log: LogSettings = field(default_factory=LogSettings)
    broker: StreamsSettings = field(default_factory=StreamsSettings)
    """Of the durable streams: queue bounds, leases, retention; equal in all processes of a deployment."""


def load_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags and environment. Raises SettingsError that names the flag or variable."""
    flags = {name: value for name, value in vars(_parser().parse_args(argv)).items() if value is not None}
    environ = os.environ if environ is None else environ
    settings = _from_environment(environ)
    groups: dict[str, dict[str, Any]] = {}
    for name, value in flags.items():
        group, _, field_name = name.partition(".")
        groups.setdefault(group, {})[field_name] = value
    changes: dict[str, Any] = {
        group: dataclasses.replace(getattr(settings, group), **values) for group, values in groups.items()
    }
    settings = dataclasses.replace(settings, **changes)
    _check(settings)
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagestream-gateway", description="gRPC and OpenAI HTTP in front of the durable token stream."
    )
    defaults = Settings()

    def flag(name: str, dest: str, kind: type, text: str) -> None:
        parser.add_argument(
            name, dest=dest, type=kind, default=None, metavar=name[2:].upper().replace("-", "_"), help=text
        )

    flag("--redis", "redis.url", str, f"Redis address (default {defaults.redis.url})")
    flag("--host", "listen.host", str, f"address to bind (default {defaults.listen.host})")
    flag(
        "--http-port",
        "listen.http_port",
        int,
        f"OpenAI HTTP port (default {defaults.listen.http_port}; 0 = a free one)",
    )
    flag("--grpc-port", "listen.grpc_port", int, f"gRPC port (default {defaults.listen.grpc_port}; 0 = a free one)")
    flag("--metrics-port", "listen.metrics_port", int, "second port with /metrics, /healthz and /readyz alone")
    flag("--api-keys", "auth.api_keys", Path, "file of sha256(key) -> tenant; without it no key is asked for")
    flag("--gateway-id", "gateway.id", str, "name of this process in Redis (default: random)")
    flag("--log-level", "log.level", str, f"lowest level written (default {defaults.log.level})")
    return parser


def _from_environment(environ: Mapping[str, str]) -> Settings:
    """Reads PAGESTREAM_<GROUP>__<FIELD> for this process' groups; variables of other groups belong to other
    processes.
    """
    hints = typing.get_type_hints(Settings)
    groups = {name.upper(): kind for name, kind in hints.items() if kind is not StreamsSettings}
    given: dict[str, dict[str, Any]] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or "__" not in variable:
            continue
        group, _, name = variable.removeprefix(ENV_PREFIX).partition("__")
        kind = groups.get(group)
        if kind is None:
            _refuse_misspelt(variable, group, groups)
            continue
        fields = typing.get_type_hints(kind)
        if name.lower() not in fields:
            expected = ", ".join(f"{ENV_PREFIX}{group}__{known.upper()}" for known in fields)
            raise SettingsError(f"{variable}: unknown setting; known in this group: {expected}")
        given.setdefault(group.lower(), {})[name.lower()] = _parse(variable, text, fields[name.lower()])
    try:
        broker = settings_from_environment(environ)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return Settings(**{group: hints[group](**values) for group, values in given.items()}, broker=broker)


def _refuse_misspelt(variable: str, group: str, groups: Mapping[str, Any]) -> None:
    """A group that is not ours is another process' own, unless it is nearly one of ours."""
    close = difflib.get_close_matches(group, groups, n=1, cutoff=0.8)
    if close:
        raise SettingsError(f"{variable}: unknown group {group}; did you mean {ENV_PREFIX}{close[0]}__...?")


def _parse(variable: str, text: str, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    try:
        return kind(text)
    except ValueError as error:
        raise SettingsError(f"{variable}: {text!r} is not a valid {kind.__name__}") from error


def _check(settings: Settings) -> None:
    listen = settings.listen
    for name, port in (
        ("http_port", listen.http_port),
        ("grpc_port", listen.grpc_port),
        ("metrics_port", listen.metrics_port),
    ):
        if port is not None and not 0 <= port <= 65535:
            raise SettingsError(f"listen.{name} (--{name.replace('_', '-')}): {port} is not a TCP port (0 to 65535)")
    scheme, separator, _ = settings.redis.url.partition("://")
    if f"{scheme}{separator}" not in SCHEMES:
        raise SettingsError(f"redis.url (--redis): expected {', '.join(SCHEMES)}..., got {scheme[:40]!r}")
    if settings.log.level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise SettingsError(f"log.level (--log-level): {settings.log.level!r} is not DEBUG, INFO, WARNING or ERROR")
    for group_name in ("redis", "limits", "stream", "shutdown"):
        for name, value in dataclasses.asdict(getattr(settings, group_name)).items():
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise SettingsError(f"{group_name}.{name}: {value} must be above 0 and finite")
