"""The engine side: claim requests, append tokens, hand back."""

from pagestream_streams.engine.session import EngineSession, append_arguments, slice_of

__all__ = ["EngineSession", "append_arguments", "slice_of"]
