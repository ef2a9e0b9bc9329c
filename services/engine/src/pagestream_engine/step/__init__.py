"""From scheduled steps to plans, and from their results to outputs."""
