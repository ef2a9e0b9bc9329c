"""Who changes numbers must raise a version: the bits of fixed computations are those recorded for the versions."""

from __future__ import annotations

from typing import Any

import pytest
from engine.numerics.record import COMMAND, Computed, changed, complaint, compute, recorded, usable_processors
from pagestream_engine.numerics_versions import NUMERICS

pytestmark = [pytest.mark.builds, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def computed() -> Computed:
    processors = usable_processors()
    if not processors:
        pytest.skip("golden bits are kept of x86-64 processors with AVX2 or more")
    return compute(processors[0])


@pytest.mark.parametrize("numeric", NUMERICS)
def test_bits_are_those_of_the_version(numeric: str, computed: Computed) -> None:
    entries = recorded()
    assert entries[numeric]["version"] == NUMERICS[numeric], f"no bits are recorded for this version of it; {COMMAND}"
    key, bits = computed[numeric]
    if key not in entries[numeric]["bits"]:
        pytest.skip(f"no golden bits of {numeric} for {key}; to have them, {COMMAND}")
    names = changed(numeric, computed, entries, NUMERICS)
    assert names == [], complaint(numeric, names)
    assert set(bits) == set(entries[numeric]["bits"][key]), f"other computations than those recorded; {COMMAND}"


def test_bits_that_change_ask_for_a_version() -> None:
    entries: dict[str, Any] = {"text": {"version": 1, "bits": {"all": {"deltas": "1f", "stops": "2f"}}}}
    now: Computed = {"text": ("all", {"deltas": "1f", "stops": "3f", "new": "4f"})}
    assert changed("text", now, entries, {"text": 1}) == ["stops"]
    assert changed("text", now, entries, {"text": 2}) == []
    assert "raise its version" in complaint("text", ["stops"])


def test_another_machine_is_not_held_to_these_bits() -> None:
    entries: dict[str, Any] = {"native": {"version": 1, "bits": {"avx2, gcc 12": {"float32": "1f"}}}}
    assert changed("native", {"native": ("avx2, gcc 14", {"float32": "2f"})}, entries, {"native": 1}) == []
