"""The formats in which models write reasoning and tool calls: a file a format divides an output as its text arrives."""
