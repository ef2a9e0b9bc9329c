"""Loading of the engine, in the process and on the thread that step it."""

from collections.abc import Callable

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine

from pagestream_worker.collector import spare_what_lives

EngineFactory = Callable[[str, EngineConfig], Engine]
"""Makes an engine from a model and settings; picklable where the engine gets a process of its own."""


def load_engine(make_engine: EngineFactory, model: str, config: EngineConfig) -> Engine:
    """Load the model.

    Raises:
        EngineError: the model can't be loaded with these settings.
    """
    engine = make_engine(model, config)
    spare_what_lives()
    return engine
