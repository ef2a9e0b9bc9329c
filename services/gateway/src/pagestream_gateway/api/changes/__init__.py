"""Calls by which operators change what a deployment serves. They exist where settings allow them."""
