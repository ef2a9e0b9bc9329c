"""/v1/files and /v1/batches, as OpenAI's Batch API has them."""
