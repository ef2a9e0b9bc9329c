"""The study of disaggregation: what it finds where the answer is known, how it goes on, and its goodputs."""

from pathlib import Path

import pytest
from pagestream_simulator import TraceRow, read_trace
from support import traces

from research.disaggregation.report import goodput, tables, write_plot
from research.disaggregation.study import LOADS, SHAPES, Machine, drawn, objectives, outcome, serve, study
from research.scheduling_policies.study import thinned

pytestmark = pytest.mark.served

TRACE = Path(traces.__path__[0]) / "azure_llm_2023_conv_300.csv"
MACHINE = Machine(lambda step: 0.01 + 0.001 * step.prefill_tokens, 4096, 1, 1e9, 8192)


def test_prompts_delay_the_tokens_of_a_mixed_pool_less_under_a_bound_and_least_of_a_split_one() -> None:
    rows = [TraceRow(0.0, 300, 30)] * 100
    requests, wanted = drawn(rows, 8.0), objectives(MACHINE, rows)
    names = ("mixed", "mixed, bounded", "split 2:2")
    p99 = [outcome(requests, serve(requests, MACHINE, SHAPES[each], 0.1), wanted)["itl_s"]["p99"] for each in names]
    assert p99[0] > 0.3
    assert p99[1] == pytest.approx(0.1, rel=0.3)
    assert p99[2] < 0.06


def test_a_study_goes_on_where_it_was_interrupted_and_is_printed_and_drawn(tmp_path: Path) -> None:
    rows = thinned(read_trace(str(TRACE)), 3)
    kept: dict[str, object] = {}
    num_saved: list[int] = []
    study({"azure_x.csv": rows}, kept, lambda content: num_saved.append(len(content)))
    num_runs = 3 * (1 + len(LOADS) * (len(SHAPES) - 1) + 1)
    assert num_saved == list(range(1, num_runs + 1))
    del kept["gpu/azure_x.csv/0.8/mixed"]
    study({"azure_x.csv": rows}, kept, lambda content: num_saved.append(len(content)))
    assert num_saved[num_runs:] == [num_runs]
    lines = list(tables(kept))
    assert sum(line.startswith("| 80% | split 2:2, 10% lost |") for line in lines) == 3
    assert sum(line.startswith("| mixed |") for line in lines) == 1
    pytest.importorskip("matplotlib")
    write_plot(kept, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("met", "expected"),
    [((0.95, 0.92, 0.88), 0.9), ((0.95, 0.85, 0.95), 0.5), ((0.89, 0.95, 0.99), None), ((1.0, 1.0, 0.9), float("inf"))],
)
def test_the_goodput_is_the_load_at_which_nine_in_ten_meet_their_objectives(
    met: tuple[float, ...], expected: float | None
) -> None:
    assert goodput((0.4, 0.6, 1.2), met) == (expected if expected is None else pytest.approx(expected))
