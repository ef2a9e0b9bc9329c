"""Divide a decoder among ranks: each layer among some, layers among stages."""
