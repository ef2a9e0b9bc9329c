"""How long the parts of a load take."""

import time


class LoadTimes:
    """Measures consecutive parts. The first one begins now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By part."""
        self._began = time.perf_counter()

    def note(self, part: str) -> None:
        """End a part; the next one begins."""
        now = time.perf_counter()
        self.seconds[part] = now - self._began
        self._began = now
