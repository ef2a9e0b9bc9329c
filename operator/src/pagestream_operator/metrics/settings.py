"""The numbers of the metrics path, each with its unit and reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Bounds of what the store keeps. Beyond a bound, new names are refused; what is known goes on."""

    max_pods: int = 4096  # four times what one operator should hold
    max_instances: int = 3  # of one pod: the last restarts
    max_gateways: int = 256
    max_models: int = 256
    max_attribute_sets: int = 128  # of one metric of one process; a queue has partitions x classes of them
    max_latency_series: int = 2048  # attribute sets of a latency over all gateways of a model
    forget_s: float = 300.0  # a process that was silent for so long is dropped
    future_s: float = 5.0  # a point that claims to be from further ahead would hide all that follow: refused
    rate_window_s: float = 6.0  # token rates are taken over so long: three exports
    latency_kept_s: float = 300.0  # the longest window of a TTFT term
    gateways_apart_s: float = 5.0  # gateways that are this close to the newest one count: two exports and a bit


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """Bounds of what the sink takes in."""

    host: str = "[::]"
    port: int = 4317  # OTLP/gRPC's own; 0 takes a free one
    max_message_bytes: int = 8 * 1024 * 1024  # an export of 1,000 pods has about 3 MB
    max_concurrent_exports: int = 16  # each holds at most one message
    grace_s: float = 2.0  # for exports in flight when the sink stops
