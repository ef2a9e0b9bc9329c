"""Term (a): KV utilization against its target.

The demand is smoothed, since a peak is over before a pod that was ordered for it is ready.
"""

from __future__ import annotations

from dataclasses import replace

from pagestream_scaling.decision import Limit
from pagestream_scaling.memory import ScalingMemory
from pagestream_scaling.policy import ScalingPolicy
from pagestream_scaling.samples import ValidSamples
from pagestream_scaling.supply import Supply
from pagestream_scaling.terms.term import Situation, Term, pods_for

_SUMS_KEPT = 256


def kv_utilization_term(situation: Situation) -> Term:
    """Pods that hold the KV demand at the target; fewer only below `low`, and only as many as stay under the target."""
    policy, ready = situation.policy.kv_utilization, situation.supply.ready
    known = [situation.valid.samples[pod.name].kv_utilization for pod in ready if pod.name in situation.valid.samples]
    total = sum(known)
    silent = len(ready) - len(known) + situation.supply.lost  # for the floor they count as full
    counted = max(1, len(known) + silent)
    need = pods_for(situation.kv_sum * situation.counted_part / policy.target)
    is_low = (situation.kv_sum + silent) / counted < policy.low and (total + silent) / counted <= policy.target
    floor = pods_for((situation.kv_sum + silent) / policy.target) if is_low else situation.replicas
    mean = total / len(known) if known else 0.0
    sentence = (
        f"KV utilization was {situation.kv_sum / max(1, len(ready)):.2f} of late, {mean:.2f} now, over {len(known)} of "
        f"{len(ready)} ready pods, target {policy.target:.2f}: {need} needed"
    )
    inputs = {"kv_utilization": mean, "kv_utilization_sum": situation.kv_sum}
    return Term(Limit.KV_UTILIZATION, need, max(need, floor), sentence, inputs)


def with_kv_sum(
    memory: ScalingMemory, now_s: float, valid: ValidSamples, supply: Supply, policy: ScalingPolicy
) -> ScalingMemory:
    """Remember the KV utilization added over the pods: the demand in pods, whatever their number is."""
    total = sum(valid.samples[pod.name].kv_utilization for pod in supply.ready if pod.name in valid.samples)
    span_s = max(policy.kv_utilization.window_s, policy.kv_utilization.horizon * supply.startup_s)
    recent = [entry for entry in memory.kv_sums if now_s - entry[0] < span_s]
    return replace(memory, kv_sums=(*recent[1 - _SUMS_KEPT :], (now_s, total)))


def mean_kv_sum(memory: ScalingMemory) -> float:
    """The mean over the remembered decisions, this one included."""
    return sum(total for _, total in memory.kv_sums) / len(memory.kv_sums)
