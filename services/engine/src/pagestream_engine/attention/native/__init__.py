"""The CPU's C++ kernels: their source, its compilation, and the calls."""
