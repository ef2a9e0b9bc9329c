"""The C++ kernel of adapters."""
