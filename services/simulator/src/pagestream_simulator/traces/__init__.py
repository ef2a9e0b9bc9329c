"""Request traces: files in published forms, lengths scaled to a context, and arrivals scaled to a load."""

from pagestream_simulator.traces.context import scale_factor, scale_to_context
from pagestream_simulator.traces.files import SAMPLE, TraceRow, read_trace, sample_path, write_csv
from pagestream_simulator.traces.load import Load, scale_arrivals

__all__ = [
    "SAMPLE",
    "Load",
    "TraceRow",
    "read_trace",
    "sample_path",
    "scale_arrivals",
    "scale_factor",
    "scale_to_context",
    "write_csv",
]
