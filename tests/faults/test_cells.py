"""The matrix has every cell once, and its cover every pair."""

import itertools

from pagestream.v1.inference_pb2 import SamplingParams
from support.faults.cluster import Fault
from support.faults.feature_rows import FEATURE_ROWS, sampling_of
from support.faults.matrix import ALONE, FACTORS, PASSAGES, Moment, Target, all_cells, brief_cells, covering_cells
from support.faults.setups import Engines

DISTURBED = (Fault.KILL, Fault.STOP, Fault.CUT)
FAULTS = {
    Target.ENGINE: DISTURBED,
    Target.GATEWAY: DISTURBED,
    Target.REDIS: (*DISTURBED, Fault.FILL),
    Target.TWO: DISTURBED,
    Target.ENGINE_PROCESS: (Fault.KILL, Fault.STOP),
    Target.EXECUTOR: (Fault.KILL, Fault.STOP),
    Target.RANK: (Fault.KILL, Fault.STOP),
}


def test_has_every_combination_once() -> None:
    cells = all_cells()
    assert len({str(cell) for cell in cells}) == len(cells) == 189
    assert {cell.target for cell in cells} == set(Target)
    for target, faults in FAULTS.items():
        expected = set(itertools.product(faults, Moment))
        assert {(cell.fault, cell.moment) for cell in cells if cell.target is target} == expected
    for engines in Engines:
        assert {cell.moment for cell in cells if cell.engines is engines} == set(Moment)


def test_the_cover_has_every_pair_of_values() -> None:
    cells = covering_cells()
    assert any(cell.fault is Fault.FILL for cell in cells)
    assert set(ALONE) < {cell.target for cell in cells}
    assert {cell.engines for cell in cells} == set(Engines)
    assert set(cells) <= set(all_cells())
    assert len(cells) == 33
    cells = [cell for cell in cells if cell.fault is not Fault.FILL and cell.target in FACTORS["target"]]
    for first, second in itertools.combinations(FACTORS, 2):
        seen = {(getattr(cell, first), getattr(cell, second)) for cell in cells}
        assert seen == set(itertools.product(FACTORS[first], FACTORS[second]))


def test_the_part_of_make_test_has_every_fault_that_parts_share() -> None:
    cells = brief_cells()
    assert {cell.fault for cell in cells} == set(DISTURBED)
    assert set(cells) < set(all_cells())


def test_every_moment_has_a_fault_point() -> None:
    assert set(PASSAGES) == set(Moment)


def test_every_sampling_parameter_has_a_row() -> None:
    refused = {"prompt_logprobs"}  # refused by the gateway for streams
    fields = {field.name for field in SamplingParams.DESCRIPTOR.fields} - refused
    assert {name for row in FEATURE_ROWS for name in sampling_of(row)} == fields


def test_rows_have_distinct_names_and_prompts() -> None:
    assert len({row.name for row in FEATURE_ROWS}) == len({row.prompt for row in FEATURE_ROWS}) == len(FEATURE_ROWS)
