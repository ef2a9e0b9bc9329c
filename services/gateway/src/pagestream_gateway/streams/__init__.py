"""Answers from a request's log: events, whole answers, resumption and WebSocket."""
