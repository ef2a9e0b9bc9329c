import pagestream_scaling as scaling


def test_exported_names() -> None:
    assert scaling.__all__ == [
        "BacklogPolicy",
        "ClassSample",
        "Decision",
        "IdlePolicy",
        "KvUtilizationPolicy",
        "LatencyWindow",
        "Limit",
        "PanicPolicy",
        "PodObservation",
        "PodSample",
        "PodState",
        "PolicyInvalid",
        "PoolObservation",
        "QueueSample",
        "RatePolicy",
        "SamplesPolicy",
        "ScalingError",
        "ScalingMemory",
        "ScalingPolicy",
        "StabilizationPolicy",
        "StartupPolicy",
        "TtftPolicy",
        "decide",
        "drain_order",
    ]
    assert all(hasattr(scaling, name) for name in scaling.__all__)
