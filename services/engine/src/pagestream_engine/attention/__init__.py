"""Attention over the paged cache: one interface, one module for each kind of device."""

from pagestream_engine.attention.base import AttentionBackend, AttentionBatch, CacheShape
from pagestream_engine.attention.select import select_backend

__all__ = ["AttentionBackend", "AttentionBatch", "CacheShape", "select_backend"]
