"""Triton kernels for paged attention and its neighbours, each with a torch reference."""
