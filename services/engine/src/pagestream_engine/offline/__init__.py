"""Offline inference by vLLM's names: what `LLM` and `LLMEngine` are made of."""
