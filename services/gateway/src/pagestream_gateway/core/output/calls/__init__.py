"""The spellings in which models write tool calls."""
