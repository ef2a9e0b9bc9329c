"""The engine: continuous batching over a paged KV cache, offline or fed from the durable token stream."""
