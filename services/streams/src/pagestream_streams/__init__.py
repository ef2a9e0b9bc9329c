"""The durable token stream: requests and token logs in Redis."""
