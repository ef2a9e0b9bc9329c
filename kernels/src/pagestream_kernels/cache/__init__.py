"""Writes to the paged cache that belong to no token: copies of blocks."""
