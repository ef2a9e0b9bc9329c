from pathlib import Path

import pytest
from pagestream_simulator.errors import InputFileInvalidError
from pagestream_simulator.terms import Terms, read_terms


def test_the_studys_terms_can_be_read_and_wrong_names_are_refused(tmp_path: Path) -> None:
    terms = read_terms(Path(__file__).parents[3] / "docs/benchmarks/autoscaling-terms.toml")
    assert terms.objective == Terms().objective
    assert terms.load.tune.endswith(".csv")
    assert terms.load.report.endswith(".csv")
    assert terms.load.tune != terms.load.report
    (tmp_path / "t.toml").write_text("[objective]\nttft = 1")
    with pytest.raises(InputFileInvalidError, match="ttft"):
        read_terms(tmp_path / "t.toml")
