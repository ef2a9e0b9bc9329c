"""Answers made of vectors: embeddings, and what is scored by them."""
