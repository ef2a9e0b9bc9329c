"""Connections to Redis: topologies, scripts, durability and subscriptions."""
