"""What the law remembers from one decision to the next. A value: `decide` returns the next one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from pagestream_scaling.errors import MemoryInvalid
from pagestream_scaling.windows import Window

_FORMAT = 1
_PAIRS = (
    "arrivals",
    "kv_sums",
    "startups",
    "needs",
    "floors",
    "ready_low",
    "replicas_low",
    "replicas_high",
    "panic_needs",
)


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """Nothing in it is needed to be right about scaling out; a fresh one only holds scale-in for a window.

    Times are Unix seconds. Bounded: `arrivals` by the policy's window and 512 entries, the windows by the number of
    different replica counts.
    """

    started_s: float | None = None  # when it began to remember; None: it has seen nothing
    time_s: float | None = None  # of the last decision
    # -- work
    queue_time_s: float | None = None  # the last queue sample that was believed
    queue_tokens: float = 0.0  # and the backlog that it showed
    arrivals: tuple[tuple[float, float], ...] = ()  # (time, prompt tokens per second), one for each queue sample
    kv_sums: tuple[tuple[float, float], ...] = ()  # (time, KV utilization added over the pods that said it)
    drain_total: float | None = None  # smoothed prompt tokens per second that leave the queue
    work_total: float | None = None  # smoothed work per second that the pods get done for them
    work_mean: float | None = None  # the same for one ready pod
    utilization_mean: float | None = None  # smoothed mean KV utilization of ready pods
    capacity: float | None = None  # work per second that a pod can do
    capacity_s: float | None = None  # when it was last seen at saturation; None: known from load alone
    # -- pods
    startups: tuple[tuple[str, float], ...] = ()  # (pod, seconds from creation to ready) of the last ones seen
    startups_until_s: float | None = None  # when the last of them became ready
    lost: tuple[str, ...] = ()  # pods that were ready before and lost it: their next readiness is no start-up
    replicas: int | None = None  # of the last observation
    ready: int | None = None  # pods of the last observation
    ready_since_s: float | None = None  # since when there were so many
    raised_s: float | None = None  # when the replicas last rose
    # -- windows, see windows.py
    needs: Window = ()  # lowest need, for stabilisation up
    floors: Window = ()  # highest floor, for stabilisation down
    panic_needs: Window = ()  # lowest need, for panic
    ready_low: Window = ()  # fewest ready pods, for the TTFT term
    replicas_low: Window = ()  # fewest replicas, for the rate limit up
    replicas_high: Window = ()  # most replicas, for the rate limit down
    # -- states
    panic_until_s: float | None = None
    idle_since_s: float | None = None

    def to_json(self) -> str:
        """One line; `from_json` reads it."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The memory that `to_json` wrote.

        Raises:
            MemoryInvalid: it isn't one, or one of another version's.
        """
        try:
            values = json.loads(text)
            if values.pop("format") != _FORMAT or set(values) != {entry.name for entry in fields(cls)}:
                raise MemoryInvalid("this is a memory of another version of the law; start with a fresh one")
            pairs: dict[str, Any] = {name: tuple((first, second) for first, second in values[name]) for name in _PAIRS}
            memory = replace(cls(**values), lost=tuple(values["lost"]), **pairs)
            _check(memory)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, ValueError) as error:
            if isinstance(error, MemoryInvalid):
                raise
            raise MemoryInvalid(f"this is no memory of the law ({error}); start with a fresh one") from error
        return memory


def _check(memory: ScalingMemory) -> None:
    """Every number must be one: a text in a number's place would fail much later."""
    if not all(isinstance(name, str) for name in memory.lost):
        raise MemoryInvalid(f"lost of a memory holds {memory.lost!r} instead of names")
    for entry in fields(memory):
        if entry.name == "lost":
            continue
        value: Any = getattr(memory, entry.name)
        numbers = [value] if entry.name not in _PAIRS else [pair[1] for pair in value]
        if entry.name in _PAIRS and entry.name != "startups":
            numbers += [pair[0] for pair in value]
        for number in numbers:
            if number is not None and (not isinstance(number, int | float) or not math.isfinite(number)):
                raise MemoryInvalid(f"{entry.name} of a memory holds {number!r} instead of a number")
