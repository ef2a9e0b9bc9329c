"""The records between the core and the executor."""
