"""/v1/responses: OpenAI's responses over the durable log."""
