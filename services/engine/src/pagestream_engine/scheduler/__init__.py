"""Sequences to steps: admission, chunked prefill, decode, preemption."""
