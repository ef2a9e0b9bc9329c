"""OpenAI's HTTP API: a module per resource, with its schema, its routes and its answers."""
