"""The worker: runs the offline engine on requests from the durable token stream."""
