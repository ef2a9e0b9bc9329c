from pathlib import Path

import pytest
from support.faults.campaign_results import KEPT_FAILURES, CampaignResults, percentile


def test_resumes_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "5.json"
    results = CampaignResults.load(path, 5)
    results.kills = 3
    results.killed["engine"] += 2
    results.recovery_s.append(1.5)
    results.fail("different", "greedy: text")
    results.save(path)
    assert CampaignResults.load(path, 5) == results
    with pytest.raises(ValueError, match="seed 5"):
        CampaignResults.load(path, 6)


@pytest.mark.parametrize("kind", ["lost", "repeated", "different"])
def test_one_failed_request_makes_results_unclean(kind: str) -> None:
    results = CampaignResults(1)
    assert results.is_clean
    for _ in range(KEPT_FAILURES + 1):
        results.fail(kind, "a stream")
    assert not results.is_clean
    assert getattr(results, kind) == KEPT_FAILURES + 1
    assert len(results.failures) == KEPT_FAILURES
    assert f"| **{kind}** | **{KEPT_FAILURES + 1}** |" in list(results.table())


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0.0
    values = [float(value) for value in range(100)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 99.0]
