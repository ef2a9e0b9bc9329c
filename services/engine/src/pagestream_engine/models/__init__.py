"""Model families: configuration, weights and forward pass."""

from pagestream_engine.models.folder import model_revision, resolve_model
from pagestream_engine.models.tokenizer import has_first_texts, load_tokenizer

__all__ = ["has_first_texts", "load_tokenizer", "model_revision", "resolve_model"]
