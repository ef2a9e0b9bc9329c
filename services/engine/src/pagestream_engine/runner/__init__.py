"""From a scheduled step to sampled tokens."""

from pagestream_engine.runner.runner import ModelRunner, resolve_device

__all__ = ["ModelRunner", "resolve_device"]
