"""Sampling parameters: their definitions, and how a request's message is completed."""
