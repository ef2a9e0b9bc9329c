"""The forms of Redis addresses, for settings that are checked before redis-py is imported."""

SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)
"""Schemes of addresses; "rediss" is TLS."""
