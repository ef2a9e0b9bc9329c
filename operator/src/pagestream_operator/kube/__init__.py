"""The API server: calls, watches, leadership, and a store of the objects as they were last seen."""
