"""Which groups start by their adapters, and which adapters are in memory."""
