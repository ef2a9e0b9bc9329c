"""What crosses a boundary of the engine's processes: one typed codec, and the messages of each boundary."""
