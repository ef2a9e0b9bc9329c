"""Tile sizes of the attention kernels by chip."""
