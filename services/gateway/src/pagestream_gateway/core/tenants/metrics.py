"""What tenants use, as metrics. The first tenants have series of their own; all others share one."""

from collections.abc import Sequence

from pagestream_streams.limits import EndedRequest
from pagestream_telemetry import catalog
from pagestream_telemetry.instruments import Registry

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
