"""From a scheduled step to sampled tokens."""

from pagestream_engine.runner.graphs import CudaGraphRecorder, EagerRecorder, Step
from pagestream_engine.runner.runner import ModelRunner

__all__ = ["CudaGraphRecorder", "EagerRecorder", "ModelRunner", "Step"]
