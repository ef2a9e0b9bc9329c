from pathlib import Path

import pytest
from support.faults.tally import KEPT_FAILURES, Tally, percentile


def test_goes_on_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "5.json"
    tally = Tally.load(path, 5)
    tally.kills = 3
    tally.killed["engine"] += 2
    tally.recovery_s.append(1.5)
    tally.fail("different", "greedy: text")
    tally.save(path)
    assert Tally.load(path, 5) == tally
    with pytest.raises(ValueError, match="seed 5"):
        Tally.load(path, 6)


@pytest.mark.parametrize("kind", ["lost", "repeated", "different"])
def test_one_wrong_request_is_enough(kind: str) -> None:
    tally = Tally(1)
    assert tally.is_clean
    for _ in range(KEPT_FAILURES + 1):
        tally.fail(kind, "a stream")
    assert not tally.is_clean
    assert getattr(tally, kind) == KEPT_FAILURES + 1
    assert len(tally.failures) == KEPT_FAILURES
    assert f"| **{kind}** | **{KEPT_FAILURES + 1}** |" in list(tally.table())


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0.0
    values = [float(value) for value in range(100)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 99.0]
