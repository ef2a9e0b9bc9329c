"""Choices that modules of the engine declare. Written by `python tools/write_options.py`."""

ATTENTION_BACKENDS = ("auto", "torch", "triton")
EVICTION_POLICIES = ("lru", "slru", "lfu", "cost")
