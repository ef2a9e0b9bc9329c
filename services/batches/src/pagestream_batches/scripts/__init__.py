"""The steps of files and batches: Lua scripts beside this file, one for each step, and the names they are run by."""

from __future__ import annotations

from functools import partial

from pagestream_streams.scripts import load_script

_load = partial(load_script, "pagestream_batches")

CREATE_FILE = _load("create_file")
APPEND_FILE = _load("append_file")
COMPLETE_FILE = _load("complete_file")
DROP_FILE = _load("drop_file")
SWEEP_FILES = _load("sweep_files")
REPORT_BYTES = _load("report_bytes")
CREATE_BATCH = _load("create_batch")
CANCEL_BATCH = _load("cancel_batch")
LEASE_BATCH = _load("lease_batch")
CHANGE_STATUS = _load("change_status")
START_JOBS = _load("start_jobs")
RECORD_REQUEST = _load("record_request")
WRITE_RESULT = _load("write_result")
