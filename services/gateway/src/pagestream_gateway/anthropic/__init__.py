"""/v1/messages: Anthropic's messages over the durable log."""
