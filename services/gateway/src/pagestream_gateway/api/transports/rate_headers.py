"""The headers that say how far a caller's limits are used, with OpenAI's names."""

from collections.abc import Sequence

from pagestream_streams.rates import Rate

_NAMES = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "tokens_per_day": "tokens-day",
    "concurrent_requests": "concurrent-requests",
}
HEADERS = tuple(f"x-ratelimit-{what}-{name}" for name in _NAMES.values() for what in ("limit", "remaining", "reset"))
"""All that there may be."""


def rate_headers(rates: Sequence[Rate]) -> dict[str, str]:
    """Return the headers: of each limit the one of the tenant's and the credential's that leaves less."""
    headers: dict[str, str] = {}
    for name, short in _NAMES.items():
        found = [each for each in rates if each.name == name]
        if not found:
            continue
        least = min(found, key=lambda rate: rate.remaining)
        headers[f"x-ratelimit-limit-{short}"] = str(least.limit)
        headers[f"x-ratelimit-remaining-{short}"] = str(least.remaining)
        if least.reset_s is not None:
            headers[f"x-ratelimit-reset-{short}"] = duration(least.reset_s)
    return headers


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 250ms, 1s, 6m0s, 1h30m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s" if minutes else f"{rest}s"
