"""Divides a chat's output into content, reasoning and tool calls, as its text arrives."""
