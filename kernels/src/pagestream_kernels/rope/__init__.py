"""Rotation of query and key heads, and the write into a cache of float8."""
