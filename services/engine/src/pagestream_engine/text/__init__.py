"""Tokens to text: incremental detokenization and stop strings."""
