"""From a scheduled step to sampled tokens."""

from pagestream_engine.runner.runner import ModelRunner

__all__ = ["ModelRunner"]
