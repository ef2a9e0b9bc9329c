"""Schemas of the answers, for the OpenAPI document alone: answers are written as JSON without them."""
