"""Layers that model families share: linears, norms, rotary embedding."""
