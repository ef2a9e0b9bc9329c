"""The block pool, its prefix cache, and what holds them together."""
