"""Fleets of simulated engines that serve request traces under a scaling law."""
