"""Settings of the operator: `PAGESTREAM_OPERATOR__<FIELD>`, else the default here."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagestream_telemetry.environment import fields_of, read_environment, variable_of
from pagestream_telemetry.errors import VariableError

from pagestream_operator.errors import SettingsError

GROUP = "OPERATOR"
ALL_NAMESPACES = "*"
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_SHARED_GROUPS = ("PAGESTREAM_BROKER__", "PAGESTREAM_TELEMETRY__")


@dataclass(frozen=True)
class OperatorVariables:
    """The variables. SettingsError names a wrong one."""

    namespaces: str = ""
    """Namespaces whose pools are served, with commas between; * for all; empty: the operator's own."""
    pod_name: str = ""
    """This replica's name, in the lease and in events. Empty: the machine's name."""
    pod_namespace: str = "default"
    """Namespace of the lease."""
    lease_name: str = "pagestream-operator"
    """Of the Lease that the replicas lead by."""
    engine_image: str = "pagestream-engine:latest"
    """Image of engines whose pool names none."""
    engine_image_pull_policy: str = "IfNotPresent"
    """Always, IfNotPresent or Never, for pools that say nothing."""
    engine_image_pull_secrets: str = ""
    """Names of Secrets to pull with, with commas between, for pools that say nothing."""
    engine_config_map: str = ""
    """ConfigMap with variables that engines share with gateways. It may be missing in a pool's namespace."""
    redis_secret: str = "pagestream-redis"  # noqa: S105 - a Secret's name
    """Secret with the Redis address under the key `url`, in each pool's namespace."""
    otlp_endpoint: str = ""
    """Where engines export telemetry, such as http://collector:4317. Empty: what the shared ConfigMap says."""
    otlp_host: str = "[::]"
    """Address of the operator's own OTLP port."""
    otlp_port: int = 4317
    """TCP port on which the operator takes metrics by OTLP/gRPC. 0 takes a free one."""
    prometheus_url: str = ""
    """A Prometheus server to ask for metrics as well, such as http://prometheus:9090. Empty: they are pushed alone."""
    prometheus_token_file: str = ""
    """File with the bearer token for it, read anew for each question. Empty: none is sent."""
    prometheus_matchers: str = ""
    """Further label matchers for the question, in Prometheus' words: k8s_namespace_name="models"."""
    metrics_host: str = "0.0.0.0"  # noqa: S104 - probes and scrapers come from other machines
    """Address of /healthz, /readyz and /metrics."""
    metrics_port: int = 9402
    """TCP port of them. 0 takes a free one."""
    lease_duration_s: float = 10.0
    """A lease that was not renewed for so long may be taken: what the death of a leader costs, and one look more."""
    lease_renew_s: float = 3.0
    """Seconds between renewals: two may fail before the leader stops acting."""
    lease_margin_s: float = 3.0
    """A leader stops acting so long before its lease ends. It covers a write that is under way."""
    lease_look_s: float = 2.0
    """Seconds between looks of the others at the lease."""
    decide_s: float = 1.0
    """Seconds between two scaling decisions of a pool. They cost no API call unless something changes."""
    status_s: float = 10.0
    """The numbers behind an unchanged decision are written to the status at most so often."""
    resync_s: float = 300.0
    """Seconds after which all objects are listed once more, for what a watch may have lost. 0: never."""
    request_timeout_s: float = 5.0
    """For one call of the API server."""
    shutdown_s: float = 10.0
    """Seconds that ending may take after SIGTERM."""

    def __post_init__(self) -> None:
        """Checks."""
        for name, value in vars(self).items():
            if isinstance(value, float) and not (0 <= value < math.inf if name == "resync_s" else 0 < value < math.inf):
                _refuse(name, value, "seconds above 0")
        for name in ("otlp_port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                _refuse(name, getattr(self, name), "a TCP port")
        if self.prometheus_url and not self.prometheus_url.startswith(("http://", "https://")):
            _refuse("prometheus_url", self.prometheus_url, "a URL with http:// or https://")
        if self.engine_image_pull_policy not in PULL_POLICIES:
            _refuse("engine_image_pull_policy", self.engine_image_pull_policy, " or ".join(PULL_POLICIES))
        if self.lease_renew_s + self.lease_margin_s >= self.lease_duration_s:
            _refuse(
                "lease_duration_s",
                self.lease_duration_s,
                f"more than lease_renew_s + lease_margin_s ({self.lease_renew_s + self.lease_margin_s:g})",
            )
        for name in ("lease_name", "pod_namespace", "redis_secret", "engine_image"):
            if not getattr(self, name):
                _refuse(name, "", "a name")


@dataclass(frozen=True)
class EngineDefaults:
    """What pods get where their pool says nothing. Nothing in it may depend on the operator's own version."""

    image: str
    image_pull_policy: str
    pull_secrets: tuple[str, ...]
    config_map: str
    redis_secret: str
    otlp_endpoint: str
    shared: Mapping[str, str] = field(default_factory=dict)
    """The variables that the shared ConfigMap gives to this process as well: engines start anew when they change."""


@dataclass(frozen=True)
class Settings:
    """All settings of the process."""

    variables: OperatorVariables
    engine: EngineDefaults

    @property
    def namespaces(self) -> tuple[str, ...] | None:
        """Namespaces to serve; None for all."""
        names = _split(self.variables.namespaces)
        if ALL_NAMESPACES in names:
            return None
        return names or (self.variables.pod_namespace,)

    @property
    def identity(self) -> str:
        """This replica's name."""
        return self.variables.pod_name or socket.gethostname()


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Read the environment.

    Raises:
        SettingsError: a field is unknown, or a value malformed or out of range; names the variable.
    """
    try:
        given: dict[str, Any] = read_environment(environ, {GROUP: fields_of(OperatorVariables)})[GROUP]
    except VariableError as error:
        raise SettingsError(str(error)) from error
    variables = OperatorVariables(**given)
    shared = {name: value for name, value in sorted(environ.items()) if name.startswith(_SHARED_GROUPS)}
    return Settings(
        variables,
        EngineDefaults(
            image=variables.engine_image,
            image_pull_policy=variables.engine_image_pull_policy,
            pull_secrets=_split(variables.engine_image_pull_secrets),
            config_map=variables.engine_config_map,
            redis_secret=variables.redis_secret,
            otlp_endpoint=variables.otlp_endpoint,
            shared=shared if variables.engine_config_map else {},
        ),
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _refuse(name: str, given: object, expected: str) -> None:
    raise SettingsError(f"{variable_of(GROUP, name)}: {given!r} was given, {expected} is expected")
