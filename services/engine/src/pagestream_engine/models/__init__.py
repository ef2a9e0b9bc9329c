"""Model families: configuration, weights and forward pass."""

from pagestream_engine.models.folder import model_revision, resolve_model
from pagestream_engine.models.tokenizer import load_tokenizer

__all__ = ["load_tokenizer", "model_revision", "resolve_model"]
