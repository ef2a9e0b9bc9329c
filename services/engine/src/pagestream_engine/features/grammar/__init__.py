"""Structured output: which tokens a request's grammar allows next."""
