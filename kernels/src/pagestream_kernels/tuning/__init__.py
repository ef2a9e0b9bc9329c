"""`make kernel-tables`: how the tables of tile sizes are written."""
