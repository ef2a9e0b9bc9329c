"""What `pagestream usage` sums and prints."""

import pytest
from pagestream_cli import usage
from pagestream_cli.errors import UsageError
from pagestream_streams.limits.usage import Usage

ROWS = [
    Usage(3600, 3600, "a", "k1", "llama", 2, 100, 40, 1500),
    Usage(7200, 3600, "a", "k2", "llama", 1, 10, 0, 5),
    Usage(7200, 3600, "b", "", "qwen", 4, 4000, 0, 1),
]


def test_rows_are_summed_and_the_largest_comes_first() -> None:
    by = usage.columns_of("tenant,model")
    assert usage.table(usage.summed(ROWS, by), by).splitlines() == [
        "tenant  model  requests  prompt tokens  cached tokens  output tokens",
        "b       qwen          4          4,000              0              1",
        "a       llama         3            110             40          1,505",
        "all                   7          4,110             40          1,506",
    ]


def test_rows_by_time_are_in_order() -> None:
    found = usage.summed(ROWS, usage.columns_of("time,key"))
    assert [(each["time"], each["key"], each["requests"]) for each in found] == [
        ("1970-01-01 01:00 UTC", "k1", 2),
        ("1970-01-01 02:00 UTC", "-", 4),
        ("1970-01-01 02:00 UTC", "k2", 1),
    ]


@pytest.mark.parametrize("text", ["", "24", "0h", "h", "-1h", "1w"])
def test_a_span_has_a_unit(text: str) -> None:
    with pytest.raises(UsageError, match="--since"):
        usage.seconds_of(text)


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(UsageError, match="tenant, key, model, time, got 'user'"):
        usage.columns_of("tenant,user")
