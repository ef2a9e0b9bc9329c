"""The commands that ask a server for text, and their options."""
