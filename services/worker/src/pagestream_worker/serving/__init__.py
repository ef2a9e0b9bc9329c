"""The tasks of a serving engine process: claim, take outputs, append, mark, shut down."""
