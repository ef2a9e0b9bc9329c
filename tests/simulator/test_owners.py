"""The simulator has no copies of constants: it uses those of the packages that it simulates."""

import ast
import re
from pathlib import Path

import numpy as np
from pagestream_engine.config import DEFAULT_BLOCK_SIZE, SchedulerConfig
from pagestream_engine.scheduler.admission import RESERVE_SHARE
from pagestream_operator.settings import OperatorVariables
from pagestream_scaling import KvUtilizationPolicy, TtftPolicy
from pagestream_simulator.fleet import fleet, signals
from pagestream_simulator.fleet.fleet import Fleet
from pagestream_simulator.fleet.profile import EngineProfile, StepCost
from pagestream_simulator.laws import HpaSettings
from pagestream_simulator.terms import Terms, read_terms
from pagestream_simulator.traces.load import Load
from pagestream_streams.protocol.ids import DEFAULT_PARTITIONS
from pagestream_streams.settings import StreamsSettings
from pagestream_telemetry.catalog import TIME_TO_FIRST_TOKEN
from pagestream_telemetry.settings import TelemetrySettings
from pagestream_worker.settings import WorkerSettings

STUDY = Path(__file__).parents[3] / "docs" / "benchmarks" / "autoscaling-terms.toml"
SOURCES = sorted(Path(fleet.__file__).parents[1].rglob("*.py"))


def test_defaults_are_those_of_their_owners() -> None:
    terms, profile, scheduler = Terms(), EngineProfile(StepCost(1, 0, 0, 0, 0)), SchedulerConfig()
    assert terms.objective.ttft_s == TtftPolicy().objective_s
    assert terms.objective.attainment == TtftPolicy().attainment
    assert terms.fleet.partitions == WorkerSettings.partitions == DEFAULT_PARTITIONS
    assert read_terms(STUDY).fleet.partitions == DEFAULT_PARTITIONS
    assert terms.signals.export_s == TelemetrySettings().export_interval_s
    assert terms.signals.decide_s == OperatorVariables().decide_s  # the operator can't be imported by the simulator
    assert HpaSettings().target == KvUtilizationPolicy().target
    assert profile.block_size == DEFAULT_BLOCK_SIZE
    assert profile.max_num_seqs == scheduler.max_num_seqs
    assert profile.max_num_batched_tokens == scheduler.max_num_batched_tokens


def test_signals_have_the_bounds_and_windows_of_their_owners() -> None:
    assert signals.TTFT_BOUNDS_S is TIME_TO_FIRST_TOKEN.bounds
    assert TtftPolicy().window_s == signals.TTFT_WINDOW_S
    assert StreamsSettings().drain_window_ms == signals.DRAIN_WINDOW_S * 1000


def test_the_fleets_cpp_has_no_constant_of_a_rule() -> None:
    cpp = Path(fleet.__file__).with_name("fleet.cpp").read_text()
    assert not re.findall(r"constexpr \w+ k\w+ = [\d.]+", cpp)
    native = {name for name, _ in fleet._Profile._fields_}
    assert "reserve_share" in native
    assert fleet.RESERVE_SHARE is RESERVE_SHARE


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


def test_no_module_imports_the_command_the_operator_or_a_heavy_library_at_its_head() -> None:
    heads = {
        (path.name, name.split(".")[0])
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    forbidden = {"pagestream_cli", "pagestream_operator", "kopf", "matplotlib", "torch", "transformers"}
    assert not {(file, package) for file, package in heads if package in forbidden}
