"""Linears by C++ kernels whose bits depend on the row, the weight and the bias alone."""
