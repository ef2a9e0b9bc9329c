"""What an engine process keeps of its requests: the log to write, the sampling, the room that they take."""
