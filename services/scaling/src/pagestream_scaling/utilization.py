"""KV utilization added over the pods, smoothed: by the time a pod ordered for a peak is there, it is over."""

from __future__ import annotations

from dataclasses import replace

from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.policy import ScalingPolicy
from pagestream_scaling.samples import Believed
from pagestream_scaling.supply import Supply

_KEPT = 256


def with_kv_sum(
    memory: ScalingMemory, now_s: float, believed: Believed, supply: Supply, policy: ScalingPolicy
) -> ScalingMemory:
    """Remember what the pods say now. The sum, and not the mean: it is the demand, whatever the number of pods is."""
    total = sum(believed.samples[pod.name].kv_utilization for pod in supply.ready if pod.name in believed.samples)
    span_s = max(policy.kv_utilization.window_s, policy.kv_utilization.horizon * supply.startup_s)
    recent = [entry for entry in memory.kv_sums if now_s - entry[0] < span_s]
    return replace(memory, kv_sums=(*recent[1 - _KEPT :], (now_s, total)))


def mean_kv_sum(memory: ScalingMemory) -> float:
    """Over the remembered decisions, this one included."""
    return sum(total for _, total in memory.kv_sums) / len(memory.kv_sums)
