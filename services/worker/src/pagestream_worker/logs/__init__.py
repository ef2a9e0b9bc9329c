"""The logs of the claimed requests: entries that Redis lacks, or may ask for again; in C++ where it can be compiled."""
