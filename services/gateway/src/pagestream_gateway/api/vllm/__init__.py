"""Calls of `vllm serve` beside OpenAI's."""
