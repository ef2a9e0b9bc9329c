"""The Triton kernels of linears."""
