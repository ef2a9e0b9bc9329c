"""Batches: files that are uploaded, and jobs that run of them without their caller."""
