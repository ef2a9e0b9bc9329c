"""The formats in which models write tool calls and reasoning: a file a format divides an output as its text arrives."""
