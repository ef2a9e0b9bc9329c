"""Weights of layers that stay in host memory, and come to the device for their turn."""
