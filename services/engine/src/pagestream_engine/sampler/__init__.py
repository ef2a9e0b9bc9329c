"""From logits to tokens."""

from pagestream_engine.sampler.sampler import sample

__all__ = ["sample"]
