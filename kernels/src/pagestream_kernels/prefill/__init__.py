"""The Triton kernel of prefill attention, and the list of its work."""
