"""Settings of the operator: `PAGESTREAM_OPERATOR__<FIELD>`, else the default here.

A setting is declared once, as a field of `OperatorVariables`: its name, its type with what is allowed, its default and
its help, from which the reader and docs/settings.md are derived. What engine pods have of it is a field of
`EngineDefaults` of the same name, without `engine_`.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, NamedTuple, NoReturn, get_type_hints

from pagestream_telemetry.addresses import ALL_ADDRESSES
from pagestream_telemetry.environment import fields_of, read_environment, variable_of
from pagestream_telemetry.errors import VariableError

from pagestream_operator.errors import SettingsError

GROUP = "OPERATOR"
ALL_NAMESPACES = "*"
JOB_RESOURCES = '{"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}'
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_SHARED_GROUPS = ("PAGESTREAM_BROKER__", "PAGESTREAM_TELEMETRY__")


class _Allowed(NamedTuple):
    """Which values a type lets pass."""

    holds: Callable[[Any], bool]
    expected: str


Seconds = Annotated[float, _Allowed(lambda given: 0 < given < math.inf, "seconds above 0")]
SecondsOrNever = Annotated[float, _Allowed(lambda given: 0 <= given < math.inf, "seconds, or 0 for never")]
Port = Annotated[int, _Allowed(lambda given: 0 <= given <= 65_535, "a TCP port")]
Name = Annotated[str, _Allowed(bool, "a name")]
Url = Annotated[
    str,
    _Allowed(lambda given: not given or given.startswith(("http://", "https://")), "a URL with http:// or https://"),
]
PullPolicy = Annotated[str, _Allowed(PULL_POLICIES.__contains__, " or ".join(PULL_POLICIES))]


@dataclass(frozen=True)
class OperatorVariables:
    """The operator's environment variables. A wrong value raises SettingsError, which names the variable."""

    namespaces: Sequence[str] = ()
    """Namespaces whose pools are served, separated by commas; *: all; empty: the operator's own."""
    pod_name: str = ""
    """This replica's name in the lease and in events. Empty: the host name."""
    pod_namespace: Name = "default"
    """Namespace of the lease."""
    lease_name: Name = "pagestream-operator"
    """Name of the Lease by which the replicas elect a leader."""
    stateful_set: str = ""
    """The StatefulSet of the replicas in the lease's namespace. Where it is being deleted, or is to have none, replicas
    that end remove the finalizer from their pools, which nobody would drain. Empty: the lease alone is looked at."""
    release: str = ""
    """The release of Pagestream whose pools this operator serves, and whose queues it scales by: the controllerClass of
    its pools, and the resource attribute pagestream.release of its gateways. Empty: POD_NAMESPACE.LEASE_NAME."""
    engine_image: Name = "pagestream-engine:latest"
    """Image of engines whose pool names none."""
    engine_image_pull_policy: PullPolicy = "IfNotPresent"
    """Always, IfNotPresent or Never, for pools that set none."""
    engine_image_pull_secrets: Sequence[str] = ()
    """Names of image pull Secrets, separated by commas, for pools that set none."""
    engine_arbitrary_user: bool = False
    """Whether the platform chooses the users of engine pods, as OpenShift does: the pods then name none."""
    job_resources: str = JOB_RESOURCES
    """Requests and limits of the Jobs that the operator makes, as a JSON object. What it lacks is that of engines."""
    engine_config_map: str = ""
    """ConfigMap with variables that engines share with gateways. It may be missing in a pool's namespace."""
    redis_secret: Name = "pagestream-redis"  # noqa: S105 - a Secret's name
    """Secret with the Redis address under the key `url`, in each pool's namespace."""
    redis_login: str = ""
    """Changes with the address in that Secret: engines are then replaced, and log in anew."""
    otlp_endpoint: str = ""
    """Where engines export telemetry, such as http://collector:4317. Empty: that of the shared ConfigMap."""
    otlp_host: str = "[::]"
    """Address of the operator's own OTLP port."""
    otlp_port: Port = 4317
    """TCP port on which the operator takes metrics by OTLP/gRPC. 0 takes a free one."""
    otlp_certificate_file: str = ""
    """PEM file with that port's certificate, read again for each connection. Empty: plain text."""
    otlp_key_file: str = ""
    """PEM file with its private key."""
    otlp_token_file: str = ""
    """File with the bearer token that senders must have, read again when it changes. Empty: none is asked for."""
    prometheus_url: Url = ""
    """A Prometheus server as a second source of metrics, such as http://prometheus:9090. Empty: OTLP alone."""
    prometheus_token_file: str = ""
    """File with its bearer token, read again for each query. Empty: none is sent."""
    prometheus_ca_file: str = ""
    """PEM file with the CA of its certificate, read again after a failure. Empty: the system's."""
    prometheus_scrape_s: Seconds = 2.0
    """Seconds between its scrapes of gateways and engines. It is asked as often, and for the last eight scrapes at
    least. With more than 5, pools must believe older samples: `scaling.samples.staleSeconds` of twice as much."""
    prometheus_matchers: str = ""
    """Further label matchers of the query, in PromQL: k8s_namespace_name="models"."""
    metrics_host: str = ALL_ADDRESSES
    """Address of /healthz, /readyz and /metrics; ::, all of this machine, IPv4 and IPv6: probes and scrapers come from
    other ones."""
    metrics_port: Port = 9402
    """TCP port of these pages. 0 takes a free one."""
    lease_duration_s: Seconds = 10.0
    """Seconds without renewal after which another replica may take the lease: what a leader's death costs, at most."""
    lease_renew_s: Seconds = 3.0
    """Seconds between renewals: two may fail before the leader stops acting."""
    lease_margin_s: Seconds = 3.0
    """Seconds before the end of its lease at which a leader stops writing, for writes that are in flight."""
    lease_look_s: Seconds = 2.0
    """Seconds between the other replicas' reads of the lease."""
    decide_s: Seconds = 1.0
    """Seconds between two scaling decisions of a pool. A decision that changes nothing makes no API call."""
    status_s: Seconds = 10.0
    """Least seconds between writes of a status in which only the numbers behind the decision have changed."""
    resync_s: SecondsOrNever = 300.0
    """Seconds between lists of all objects, for deletions that no watch reported. 0: never."""
    watch_s: Seconds = 40.0
    """Seconds after which each watch is begun anew. A kind of which nothing was heard for twice as long is watched by a
    new connection; after three times as long its namespace no longer counts as seen: no pass is made there, and a
    replica that sees no namespace at all leads no longer."""
    request_timeout_s: Seconds = 5.0
    """Time limit in seconds of one call of the API server."""
    shutdown_s: Seconds = 10.0
    """Seconds after SIGTERM at which the process exits even if it hangs."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, allowed in _ALLOWED:
            if not allowed.holds(getattr(self, name)):
                _refuse(name, getattr(self, name), allowed.expected)
        if self.lease_renew_s + self.lease_margin_s >= self.lease_duration_s:
            _refuse(
                "lease_duration_s",
                self.lease_duration_s,
                f"more than lease_renew_s + lease_margin_s ({self.lease_renew_s + self.lease_margin_s:g})",
            )
        if bool(self.otlp_certificate_file) != bool(self.otlp_key_file):
            missing = "otlp_key_file" if self.otlp_certificate_file else "otlp_certificate_file"
            _refuse(missing, "", "a file, as the other one of certificate and key is given")
        read_resources(self.job_resources)


def _declared(kind: type) -> Iterator[tuple[str, _Allowed]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        yield from ((name, each) for each in getattr(hint, "__metadata__", ()) if isinstance(each, _Allowed))


_ALLOWED = tuple(_declared(OperatorVariables))


@dataclass(frozen=True)
class EngineDefaults:
    """Defaults for pods. None may depend on the operator's version: a change replaces all pods."""

    release: str
    image: str
    image_pull_policy: str
    image_pull_secrets: Sequence[str]
    config_map: str
    redis_secret: Name
    otlp_endpoint: str
    arbitrary_user: bool = False
    """Whether the platform chooses the users of pods."""
    redis_login: str = ""
    """Tells one address in `redis_secret` from the next."""
    job_resources: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: read_resources(JOB_RESOURCES))
    """Requests and limits of Jobs."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Variables of the shared ConfigMap, which this process has as well: engines are replaced when they change."""


@dataclass(frozen=True)
class Settings:
    """All settings of the process."""

    variables: OperatorVariables
    engine: EngineDefaults

    @property
    def namespaces(self) -> tuple[str, ...] | None:
        """Namespaces to serve; None: all."""
        names = tuple(self.variables.namespaces)
        if ALL_NAMESPACES in names:
            return None
        return names or (self.variables.pod_namespace,)

    @property
    def release(self) -> str:
        """The release that this operator belongs to; one of its own for each lease."""
        return self.engine.release

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
    return Settings(variables, _engine_defaults(variables, shared if variables.engine_config_map else {}))


def _engine_defaults(variables: OperatorVariables, shared: Mapping[str, str]) -> EngineDefaults:
    known: dict[str, Any] = {name.removeprefix("engine_"): value for name, value in vars(variables).items()}
    known["release"] = variables.release or f"{variables.pod_namespace}.{variables.lease_name}"
    known |= {"job_resources": read_resources(variables.job_resources), "shared": shared}
    return EngineDefaults(**{each.name: known[each.name] for each in fields(EngineDefaults)})


def read_resources(text: str) -> Mapping[str, Mapping[str, str]]:
    """Read requests and limits from JSON. Raises SettingsError."""
    expected = 'a JSON object such as {"requests": {"cpu": "100m"}, "limits": {"cpu": "1"}}'
    try:
        given = json.loads(text or "null")
        found = {kind: dict(amounts or {}) for kind, amounts in ({} if given is None else given).items()}
    except (ValueError, AttributeError, TypeError):
        _refuse("job_resources", text, expected)
    amounts = [amount for each in found.values() for amount in each.values()]
    if not found.keys() <= {"requests", "limits"} or not all(isinstance(each, str | int | float) for each in amounts):
        _refuse("job_resources", text, expected)
    return {kind: {name: str(amount) for name, amount in each.items()} for kind, each in found.items() if each}


def _refuse(name: str, given: object, expected: str) -> NoReturn:
    raise SettingsError(f"{variable_of(GROUP, name)}: {given!r} was given, {expected} is expected")
