"""Profiles on demand: torch profiler traces of the next steps, for chrome://tracing or Perfetto."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

from pagestream_engine.wire.worker import ProfileAnswer

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 60.0  # a profile that has not begun (an idle engine has no steps) may be replaced after so long


class StepProfiler:
    """`request` may be called on any thread, the rest is for the thread that steps.

    Args:
        folder: for the traces; created with the first one.
        name: the engine's, for the files' names.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._lock = threading.Lock()
        self._wanted = 0
        self._path: Path | None = None
        self._requested_at = 0.0
        self._profile: Any = None
        self.is_wanted = False
        """Whether the next step is to be profiled."""

    def request(self, steps: int) -> str:
        """Profile the next `steps` steps; returns the path of the trace, which exists once they are done.

        Raises:
            RuntimeError: a profile is running.
        """
        with self._lock:
            if self._path is not None and (self._profile is not None or not self._is_stale()):
                raise RuntimeError(f"a profile is running: {self._path}")
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            self._path = self._free_path(f"{self._name}-{stamp}")
            self._wanted, self._requested_at, self.is_wanted = steps, time.monotonic(), True
            logger.info("profiling %d steps", steps, extra={"path": str(self._path)})
            return str(self._path)

    def before_step(self) -> None:
        """Start the profiler before the first of the steps."""
        if self._profile is None:
            import torch

            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()

    def after_step(self) -> None:
        """Count a step. After the last one a thread of its own writes the trace while steps go on."""
        self._wanted -= 1
        if self._wanted > 0 or self._profile is None or self._path is None:
            return
        self._profile.stop()
        self.is_wanted = False
        threading.Thread(target=self._write, args=(self._profile, self._path), name="profile", daemon=True).start()

    def _write(self, profile: Any, path: Path) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Renamed when it is complete: a reader that waits for the path never sees a part.
            partial = path.with_name(f".{path.name}")
            profile.export_chrome_trace(str(partial))
            partial.rename(path)
            logger.info("profile written", extra={"path": str(path)})
        except (OSError, RuntimeError) as error:
            logger.error("the profile can't be written: %s", error, extra={"path": str(path)})
        finally:
            with self._lock:
                self._profile, self._path = None, None

    def _is_stale(self) -> bool:
        return time.monotonic() - self._requested_at > _REQUEST_TIMEOUT_S

    def _free_path(self, stem: str) -> Path:
        paths = (self._folder / f"{stem}{ending}.json" for ending in ("", *(f"-{n}" for n in range(2, 1000))))
        return next(path for path in paths if not path.exists())


def answer_profile(profiler: StepProfiler | None, steps: int) -> ProfileAnswer:
    """Answer `StartProfile`. Any thread may call this."""
    if profiler is None:
        return ProfileAnswer(error="no profile is written: start the process with --profile-dir")
    try:
        return ProfileAnswer(path=profiler.request(steps))
    except RuntimeError as error:
        return ProfileAnswer(error=str(error))
