"""Vectors of prompts: how a model's files say that they are made, and the hidden states that they are pooled from."""
