"""Simulates fleets of engines on request traces under a scaling law."""
