"""Text into tokens, within bounds of time and memory."""
