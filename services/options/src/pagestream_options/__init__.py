"""Every engine option and every sampling parameter, declared once, on the standard library alone.

`engine.py` and `sampling.py` are the declarations, `declaration.py` says what a declaration has. What is derived stands
with those who need it: flags here (`arguments.py`), the fields of an EnginePool in the operator, the bodies' schema and
checks in the gateway, the pages of reference in `tools/`.
"""

from pagestream_options.declaration import Option, Pool, declared, option
from pagestream_options.engine import ENGINE_OPTIONS
from pagestream_options.sampling import SAMPLING_PARAMETERS
from pagestream_options.worker import WORKER_OPTIONS, WorkerOptions

__all__ = [
    "ENGINE_OPTIONS",
    "SAMPLING_PARAMETERS",
    "WORKER_OPTIONS",
    "Option",
    "Pool",
    "WorkerOptions",
    "declared",
    "option",
]
