"""Attention and operators in plain torch operations: they run everywhere."""
