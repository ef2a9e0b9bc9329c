"""The client over gRPC: channels, messages, and the two clients, blocking and asynchronous."""
