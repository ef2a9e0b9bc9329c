"""What engines publish of themselves while somebody looks."""

from pagestream_streams.observation.block_maps import KEPT_MS, WATCHED_MS, BlockMaps
from pagestream_streams.observation.model_states import ModelRow, QueueRow, read_models

__all__ = ["KEPT_MS", "WATCHED_MS", "BlockMaps", "ModelRow", "QueueRow", "read_models"]
