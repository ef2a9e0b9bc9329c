"""Attention and operators by the Triton kernels."""
