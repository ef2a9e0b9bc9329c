"""Each policy's promise on a real trace's overload, and what the study's JSON, tables and plot have of it."""

from pathlib import Path

import pytest
from pagestream_simulator import EngineProfile, StepCost, read_trace
from support import traces

from research.scheduling_policies.report import tables, write_plot
from research.scheduling_policies.study import POLICIES, drawn, outcome, serve, study, thinned

pytestmark = pytest.mark.served

TRACE = Path(traces.__path__[0]) / "azure_llm_2023_conv_300.csv"
PROFILE = EngineProfile(StepCost(0.01, 0.0004, 3e-7, 0.0002, 3e-6), kv_blocks=1024)


def test_each_policy_keeps_its_promise_where_too_much_arrives() -> None:
    rows = thinned(read_trace(str(TRACE)), 150)
    requests = drawn(rows, serve(drawn(rows, 0.0), PROFILE, "fcfs").now_s / 1.5)
    found = {policy: outcome(requests, serve(requests, PROFILE, policy)) for policy in POLICIES}
    fcfs = found["fcfs"]
    assert fcfs["displaced"] == 0
    assert found["priority"]["parts"]["class 0"]["ttft_s"]["p99"] < 0.2 * fcfs["parts"]["class 0"]["ttft_s"]["p99"]
    assert found["shortest_first"]["whole_s"]["mean"] < 0.8 * fcfs["whole_s"]["mean"]
    assert found["round_robin"]["displaced"] > 0
    small = ("tenant b", "tenant c", "tenant d")
    assert all(found["fair"]["parts"][t]["ttft_s"]["p99"] < 0.5 * fcfs["parts"][t]["ttft_s"]["p99"] for t in small)


@pytest.mark.slow  # test_disaggregation.py has such a study
def test_a_study_goes_on_where_it_was_interrupted_and_is_printed_and_drawn(tmp_path: Path) -> None:
    rows = thinned(read_trace(str(TRACE)), 30)
    assert len(rows) == 30
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)
    saved: list[int] = []
    kept: dict[str, object] = {}
    study({TRACE.name: rows}, PROFILE, kept, lambda content: saved.append(len(content)))
    assert saved == list(range(1, 12))
    del kept[f"{TRACE.name} 1.1 fair"]
    study({TRACE.name: rows}, PROFILE, kept, lambda content: saved.append(len(content)))
    assert saved[11:] == [11]
    lines = list(tables(kept))
    assert sum(line.startswith("| fair |") for line in lines) == 4
    pytest.importorskip("matplotlib")
    write_plot(kept, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
