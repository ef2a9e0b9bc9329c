"""Files and batches of tenants: what is uploaded, what runs of it, and what came of it."""

from pagestream_streams.batches.files import FileBounds, FilePage, FileStore, new_file_id
from pagestream_streams.batches.lease import BatchLease, Gone, Held, LeaseLost
from pagestream_streams.batches.records import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    ERRORS,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    OUTPUT,
    VALIDATING,
    Batch,
    Job,
    StoredFile,
    Tokens,
)
from pagestream_streams.batches.registry import ActiveBatch, BatchPage, BatchRegistry
from pagestream_streams.batches.stored_bytes import sweep
from pagestream_streams.errors import (
    BatchesFull,
    BatchNotFound,
    FileInUse,
    FileNotFound,
    FilePurposeDiffers,
    FilesFull,
    FileTooLarge,
)

__all__ = [
    "CANCELLED",
    "CANCELLING",
    "COMPLETED",
    "ERRORS",
    "EXPIRED",
    "FAILED",
    "FINALIZING",
    "IN_PROGRESS",
    "OUTPUT",
    "VALIDATING",
    "ActiveBatch",
    "Batch",
    "BatchLease",
    "BatchNotFound",
    "BatchPage",
    "BatchRegistry",
    "BatchesFull",
    "FileBounds",
    "FileInUse",
    "FileNotFound",
    "FilePage",
    "FilePurposeDiffers",
    "FileStore",
    "FileTooLarge",
    "FilesFull",
    "Gone",
    "Held",
    "Job",
    "LeaseLost",
    "StoredFile",
    "Tokens",
    "new_file_id",
    "sweep",
]
