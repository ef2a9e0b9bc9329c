"""The audit log: who asked for what, and what became of it. It never holds a prompt, an output or a credential.

Its logger is `pagestream.audit`. What anybody can cause without a good credential, and what a caller can cause without
having a request accepted, is bounded by time, so that it can't fill a disk.
"""

import logging
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_telemetry import unmapped
from pagestream_telemetry.logs import json_formatter

from pagestream_gateway.auth.identity import Administrator, Identity
from pagestream_gateway.errors import SettingsError
from pagestream_gateway.settings import AuditSettings

logger = logging.getLogger("pagestream.audit")

_WINDOW_S = 60.0
_MAX_TEXT = 256  # characters of a path or an address


class Audit:
    """Writes the log of one process; `close` ends its file."""

    def __init__(self, settings: AuditSettings, *, is_on: bool = True) -> None:
        """Open the file, where the settings name one. Raises SettingsError where that fails.

        `is_on`: whether anything is written.
        """
        self.is_on = is_on
        """Whether anything is written: a call that may end well needs no `accepted` and `ended` else."""
        self._failures = _Bound(settings.max_failures_per_minute, "failures")
        self._refusals = _Bound(settings.max_refusals_per_minute, "refusals")
        file = settings.file if is_on else None
        self._handler = None if file is None else _file_handler(file, settings)
        if self._handler is not None:
            logger.addHandler(self._handler)
        logger.propagate = self._handler is None
        logger.setLevel(logging.INFO)  # whatever the level of other logs is

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            logger.removeHandler(self._handler)
            self._handler.close()
            logger.propagate = True

    def failed(self, peer: str, reason: str) -> None:
        """Note a call whose credentials were refused. What it gave as such is not noted, not even as a digest."""
        if self.is_on and self._failures.allows():
            logger.info("audit", extra={"event": "auth_failure", "peer": unmapped(peer[:_MAX_TEXT]), "reason": reason})

    def accepted(self, identity: Identity, spec: RequestSpec) -> None:
        """Note an accepted request."""
        self._write("accept", identity, **_request(spec))

    def refused(self, identity: Identity, api: str, code: str) -> None:
        """Note a call that was refused, or failed before its request was accepted."""
        if self.is_on and self._refusals.allows():
            self._write("refuse", identity, api=api, code=code)

    def ended(self, identity: Identity, api: str, spec: RequestSpec, outcome: str, output_tokens: int) -> None:
        """Note the end of a call that had a request; `output_tokens` are those that it was sent."""
        self._write("end", identity, api=api, **_request(spec), outcome=outcome, output_tokens=output_tokens)

    def cancelled(self, identity: Identity, request_id: str) -> None:
        """Note that a caller has ended its request."""
        self._write("cancel", identity, request_id=request_id)

    def administered(self, administrator: Administrator, method: str, path: str, code: str) -> None:
        """Note an administrator's call, with "ok" or an error's code."""
        if self.is_on:
            who = {"administrator": administrator.name, "key": administrator.key, "peer": unmapped(administrator.peer)}
            what = {"event": "admin", "method": method, "path": path[:_MAX_TEXT], "code": code}
            logger.info("audit", extra={**what, **who})

    def _write(self, event: str, identity: Identity, **more: object) -> None:
        if self.is_on:
            who = {"tenant": identity.tenant, "key": identity.key, "peer": unmapped(identity.peer)}
            logger.info("audit", extra={"event": event, **who, **more})


class _Bound:
    """Lets so many through in a minute, and logs how many it did not."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._began = time.monotonic()
        self._number = 0

    def allows(self) -> bool:
        now = time.monotonic()
        if now - self._began >= _WINDOW_S:
            if self._number > self._most:
                number = self._number - self._most
                logger.info("audit", extra={"event": "suppressed", "what": self._what, "number": number})
            self._began, self._number = now, 0
        self._number += 1
        return self._number <= self._most


def _request(spec: RequestSpec) -> dict[str, object]:
    return {
        "request_id": spec.request_id,
        "model": spec.adapter.name or spec.model,
        "prompt_tokens": sum(len(prompt.ids) for prompt in spec.prompts),
    }


def _file_handler(file: Path, settings: AuditSettings) -> RotatingFileHandler:
    try:
        handler = RotatingFileHandler(
            file, maxBytes=settings.max_file_bytes, backupCount=settings.max_files - 1, encoding="utf-8"
        )
    except OSError as error:
        raise SettingsError(f"audit.file: cannot write {file}: {error}") from error
    handler.setFormatter(json_formatter())
    return handler
