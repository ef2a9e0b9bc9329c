"""Everything that talks to the API server: calls, watches, leadership, and what was last seen."""
