"""The gateway side: accept requests and read their logs."""
