"""Pooling: vectors of prompts, scores of labels. `config` says what a model pools, `rows` collects a step's states."""
