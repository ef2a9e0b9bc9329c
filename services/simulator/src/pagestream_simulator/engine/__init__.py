"""One engine on virtual time: the real scheduler and cache, and a model of what steps take."""
