"""Linears by weights of 8 or 4 bits with scales, multiplied with activations of the model's dtype."""
