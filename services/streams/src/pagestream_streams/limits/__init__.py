"""What tenants may use, and what they have used: one place for all gateways, in keys of each tenant's own."""

from pagestream_streams.limits.ends import EndCounter, EndedRequest
from pagestream_streams.limits.usage import Usage, read_usage, tenants_with_usage
from pagestream_streams.rates import NO_LIMITS, Limits, LimitSource, Rate

__all__ = [
    "NO_LIMITS",
    "EndCounter",
    "EndedRequest",
    "LimitSource",
    "Limits",
    "Rate",
    "Usage",
    "read_usage",
    "tenants_with_usage",
]
