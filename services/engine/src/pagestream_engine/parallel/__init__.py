"""Ranks: processes that hold a part of a model each, and compute each step together."""
