"""Models: their configuration, their weights, and the forward pass of the Llama family."""
