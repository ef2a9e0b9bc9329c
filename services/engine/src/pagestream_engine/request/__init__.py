"""Requests inside the engine: parameters, sequences, and the outputs that they produce."""
