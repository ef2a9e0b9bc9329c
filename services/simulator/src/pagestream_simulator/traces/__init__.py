"""Request traces: files in published forms, lengths scaled to a context, and arrivals scaled to a load."""

from pagestream_simulator.traces.constant import ConstantArrivals
from pagestream_simulator.traces.context import scale_factor, scale_to_context
from pagestream_simulator.traces.files import SAMPLE, TraceRow, read_trace, sample_path, write_csv
from pagestream_simulator.traces.load import Load, scale_arrivals
from pagestream_simulator.traces.mixed import MixedArrivals
from pagestream_simulator.traces.mooncake import synthetic_rows
from pagestream_simulator.traces.sample import REQUESTS, sample_rows

__all__ = [
    "REQUESTS",
    "SAMPLE",
    "ConstantArrivals",
    "Load",
    "MixedArrivals",
    "TraceRow",
    "read_trace",
    "sample_path",
    "sample_rows",
    "scale_arrivals",
    "scale_factor",
    "scale_to_context",
    "synthetic_rows",
    "write_csv",
]
