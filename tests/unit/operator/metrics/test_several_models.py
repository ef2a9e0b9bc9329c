"""A pool's models as one load."""

from pagestream_operator.metrics.several_models import share_of_all, total_latencies, total_queue
from pagestream_scaling import ClassSample, LatencyWindow, QueueSample

NOW = 1_700_000_000.0
BUSY = QueueSample(
    NOW - 1,
    3,
    900,
    4.0,
    2,
    300.0,
    500,
    200.0,
    None,
    (ClassSample("batch", 900, 4.0, 300.0), ClassSample("chat", 0, 0, 0)),
)
IDLE = QueueSample(NOW, 1, 100, 9.0, 0, None, 100, None, 40, (ClassSample("batch", 100, 9.0, 0.0),))


def test_queues_add_up_and_the_oldest_and_largest_request_is_that_of_any() -> None:
    assert total_queue([BUSY, None, IDLE]) == QueueSample(
        NOW,
        4,
        1000,
        9.0,
        2,
        300.0,
        500,
        200.0,
        40,
        (ClassSample("batch", 1000, 9.0, 300.0), ClassSample("chat", 0, 0, 0)),
    )
    assert total_queue([None, BUSY]) is BUSY
    assert total_queue([None, None]) is None


def test_a_model_that_gateways_no_longer_report_is_left_out() -> None:
    gone = QueueSample(NOW - 60, 7, 700, 70.0, 7)
    total = total_queue([gone, IDLE])
    assert total is not None
    assert (total.time_s, total.tokens, total.age_s) == (NOW, 100, 9.0)


def test_the_share_of_all_queues_goes_by_their_work() -> None:
    assert share_of_all([BUSY, IDLE], [0.5, 1.0]) == (1200 * 0.5 + 100 * 1.0) / 1300
    assert share_of_all([None, None], [0.5, 1.0]) == 0.75
    assert share_of_all([BUSY], [0.25]) == 0.25


def test_latencies_add_up_where_bounds_differ() -> None:
    one, other = LatencyWindow((0.5, 1.0), (1, 2, 3), 60.0), LatencyWindow((1.0, 2.0), (10, 20, 30), 30.0)
    assert total_latencies([one, None, other]) == LatencyWindow((0.5, 1.0, 2.0), (1, 12, 20, 33), 60.0)
    assert total_latencies([LatencyWindow((), (0,), 1.0), one]) == LatencyWindow((0.5, 1.0), (1, 2, 3), 60.0)
