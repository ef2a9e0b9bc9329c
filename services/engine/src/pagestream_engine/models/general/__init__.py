"""Architectures without a family: `transformers`' own modelling code on the paged cache."""
