"""OpenAI's HTTP API, with vLLM's calls beside it: body, route and answer of a resource together."""
