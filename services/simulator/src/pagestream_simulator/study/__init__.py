"""Searches and comparisons of scaling laws."""
