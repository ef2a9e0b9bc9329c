"""The engine side: claim requests, append tokens, hand back."""

from pagestream_streams.engine.append import append_arguments
from pagestream_streams.engine.session import EngineSession

__all__ = ["EngineSession", "append_arguments"]
