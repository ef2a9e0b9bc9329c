"""The Triton kernels of decode attention."""
