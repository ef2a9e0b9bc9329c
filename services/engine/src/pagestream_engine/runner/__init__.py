"""From a scheduled step to sampled tokens."""

from pagestream_engine.runner.recorder import EagerRecorder, Step
from pagestream_engine.runner.runner import ModelRunner

__all__ = ["EagerRecorder", "ModelRunner", "Step"]
