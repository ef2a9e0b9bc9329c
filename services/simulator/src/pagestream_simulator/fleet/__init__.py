"""A fleet of simulated engine pods, stepped in C++."""
