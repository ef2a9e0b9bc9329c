"""Model families: configuration, weights and forward pass."""

from pagestream_engine.models.folder import load_tokenizer, model_revision, resolve_model

__all__ = ["load_tokenizer", "model_revision", "resolve_model"]
