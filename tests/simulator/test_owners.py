"""The simulator has no copies of constants: it uses those of the packages that it simulates."""

import inspect
from pathlib import Path

import numpy as np
from pagestream_engine import EngineConfig
from pagestream_operator import OperatorVariables
from pagestream_scaling import KvUtilizationPolicy, TtftPolicy
from pagestream_simulator import EngineProfile, Fleet, HpaSettings, Load, Scenario, StepCost, read_scenario
from pagestream_streams import Broker, StreamsSettings
from pagestream_telemetry import TelemetrySettings

STUDY = Path(__file__).parents[2] / "docs" / "benchmarks" / "autoscaling-terms.toml"


def test_defaults_are_those_of_their_owners() -> None:
    scenario, profile, engine = Scenario(), EngineProfile(StepCost(1, 0, 0, 0, 0)), EngineConfig()
    assert scenario.objective.ttft_s == TtftPolicy().objective_s
    assert scenario.objective.attainment == TtftPolicy().attainment
    partitions = inspect.signature(Broker.publish_model).parameters["partitions"].default
    assert scenario.fleet.partitions == read_scenario(STUDY).fleet.partitions == partitions
    assert scenario.signals.export_s == TelemetrySettings().export_interval_s
    assert scenario.signals.decide_s == OperatorVariables().decide_s  # the operator can't be imported by the simulator
    assert HpaSettings().target == KvUtilizationPolicy().target
    assert profile.max_num_seqs == engine.scheduler.max_num_seqs
    assert profile.max_num_batched_tokens == engine.scheduler.max_num_batched_tokens


def test_an_entry_may_be_claimed_by_another_engine_after_the_queues_own_delay() -> None:
    """The C++ gets the delay as an argument; the time of the claim shows its value."""
    load = Load(np.zeros(2), np.full(2, 100, dtype=np.int32), np.ones(2, dtype=np.int32), np.zeros(2, dtype=np.int32))
    cost = StepCost(fixed_s=10.0, prefill_token_s=0.0, prefill_pair_s=0.0, decode_s=0.0, decode_context_s=0.0)
    with Fleet(load, EngineProfile(cost, max_num_seqs=1), partitions=1) as simulated:
        simulated.add_engine(0.0)
        simulated.add_engine(0.0)
        simulated.advance(100.0)
    steal_s = StreamsSettings().steal_after_ms / 1000
    assert sorted(simulated.first_s.tolist()) == [10.0, 10.0 + steal_s]
