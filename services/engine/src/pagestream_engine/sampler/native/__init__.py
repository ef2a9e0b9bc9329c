"""The CPU's C++ kernels that draw tokens: their source, its compilation, and the calls."""
