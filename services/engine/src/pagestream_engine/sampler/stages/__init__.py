"""Stages that change logits before temperature, each with resident state for the rows that use it."""
