"""The steps of files and batches: Lua scripts beside this file, one for each step, and the names they are run by."""

from __future__ import annotations

from functools import partial

from pagestream_streams.scripts import load_script

_load = partial(load_script, "pagestream_batches")

BEGIN_FILE = _load("begin_file")
APPEND_FILE = _load("append_file")
END_FILE = _load("end_file")
DROP_FILE = _load("drop_file")
SWEEP_FILES = _load("sweep_files")
REPORT_BYTES = _load("report_bytes")
CREATE_BATCH = _load("create")
CANCEL_BATCH = _load("cancel")
LEASE_BATCH = _load("lease")
ADVANCE_BATCH = _load("advance")
TAKE_LINES = _load("take")
NOTE_JOB = _load("note")
FINISH_JOB = _load("finish")
