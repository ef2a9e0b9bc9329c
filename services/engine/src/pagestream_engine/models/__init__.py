"""Model families: configuration, weights and forward pass."""
