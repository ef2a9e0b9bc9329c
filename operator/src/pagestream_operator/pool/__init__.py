"""One pool: its view, the scaling decision, the pass that acts on it, its status."""
