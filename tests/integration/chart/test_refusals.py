"""Values that contradict each other, or are not values of the chart, are refused in words that help."""

import pytest
from support.kubernetes.api import CommandError
from support.kubernetes.chart import one, render

SENSELESS = {
    "redis.external.url=redis://redis": "set redis.bundled.enabled=false to use the external one",
    "redis.bundled.enabled=false": "say where Redis is: redis.external.url or redis.external.existingSecret",
    "redis.bundled.enabled=false,redis.external.url=redis://redis,redis.external.existingSecret=redis": (
        "give either url or existingSecret"
    ),
    f"apiKeys.existingSecret=keys,apiKeys.hashes.{'a' * 64}=team": "apiKeys.hashes must be empty",
    "collector.enabled=false": "processes reach only one operator; set operator.replicas=1",
    "operator.prometheus.tokenKey=token": "tokenKey and caKey are keys of existingSecret, which is empty",
    "gateway.tls.enabled=true": "name a Secret (gateway.tls.existingSecret) or let cert-manager make one",
    "gateway.tls.enabled=true,gateway.tls.certificate.enabled=true": "name the cert-manager issuer",
    "gateway.tls.clientCertificates.existingSecret=ca": "set gateway.tls.enabled=true",
    "gateway.tls.clientCertificates.tenants=CN:a -> a": "name the Secret that has them (existingSecret)",
    "gateway.autoscaling.minReplicas=20": "minReplicas (20) is above maxReplicas (10)",
    "gateway.httpRoute.enabled=true": "name the Gateway to attach to",
    "gateway.grpcRoute.enabled=true": "name the Gateway to attach to",
    "collector.traces.exporters={otlp_grpc/tempo}": "not described in collector.exporters",
}
UNKNOWN = {
    "gateway.replica=3": "at '/gateway': additional properties 'replica' not allowed",
    "pools.demo.maxReplica=3": "at '/pools/demo': additional properties 'maxReplica' not allowed",
    "pools.demo.replicas=3": "at '/pools/demo': additional properties 'replicas' not allowed",
    "pools.demo.model.servedname=x": "at '/pools/demo/model': additional properties 'servedname' not allowed",
    "broker.retention=600": "at '/broker': additional properties 'retention' not allowed",
    "gateway.service.type=Balancer": "value must be one of 'ClusterIP', 'NodePort', 'LoadBalancer'",
    "apiKeys.hashes.secret=team": "'secret' does not match pattern",
    "redis.external.url=http://redis": "does not match pattern",
}


@pytest.mark.parametrize("values", [*SENSELESS, *UNKNOWN])
def test_what_is_wrong_is_said(values: str) -> None:
    with pytest.raises(CommandError) as refused:
        render("--set", values)
    assert {**SENSELESS, **UNKNOWN}[values] in str(refused.value)


@pytest.mark.parametrize(
    ("values", "interval"),
    [
        ((), "10s"),
        (("operator.prometheus.url=http://prometheus:9090",), "2s"),
        (("operator.prometheus.url=http://prometheus:9090", "monitoring.monitors.interval=3s"), "3s"),
    ],
)
def test_scrapes_are_frequent_where_the_operator_scales_by_them(values: tuple[str, ...], interval: str) -> None:
    options = [part for value in ("monitoring.monitors.enabled=true", *values) for part in ("--set", value)]
    monitor = one(render(*options), "PodMonitor", "pagestream-collector")
    assert [each["interval"] for each in monitor["spec"]["podMetricsEndpoints"]] == [interval]
