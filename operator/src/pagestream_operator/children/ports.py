"""Ports of an engine pod."""

METRICS_PORT = 9400
