"""One engine on virtual time: the real scheduler and cache, and a model of what steps take."""

from pagestream_simulator.engine.step_contents import StepContents
from pagestream_simulator.engine.virtual_engine import VirtualEngine, VirtualRequest

__all__ = [
    "StepContents",
    "VirtualEngine",
    "VirtualRequest",
]
