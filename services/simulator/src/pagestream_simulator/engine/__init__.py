"""One engine on virtual time: the real scheduler and cache, and a model of what steps take."""

from pagestream_simulator.engine.received_blocks import ReceivedBlocks
from pagestream_simulator.engine.roofline import H100_SXM, LLAMA_3_1_8B, Roofline
from pagestream_simulator.engine.step_contents import StepContents
from pagestream_simulator.engine.virtual_engine import VirtualEngine, VirtualRequest
from pagestream_simulator.engine.virtual_pool import Handover, VirtualPool

__all__ = [
    "H100_SXM",
    "LLAMA_3_1_8B",
    "Handover",
    "ReceivedBlocks",
    "Roofline",
    "StepContents",
    "VirtualEngine",
    "VirtualPool",
    "VirtualRequest",
]
