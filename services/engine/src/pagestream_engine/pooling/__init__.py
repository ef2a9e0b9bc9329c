"""Vectors of prompts: how a model's files say that they are made, and the hidden states that they are pooled from."""

from pagestream_engine.pooling.labels import IDENTITY, SIGMOID, SOFTMAX, activation_of, labels_of

__all__ = ["IDENTITY", "SIGMOID", "SOFTMAX", "activation_of", "labels_of"]
