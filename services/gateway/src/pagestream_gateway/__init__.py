"""The gateway: gRPC and OpenAI HTTP in front of the durable token stream."""
