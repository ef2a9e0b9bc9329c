import numpy as np
from pagestream_engine.request.outputs import TokenLogprob
from pagestream_engine.step.logprobs import logprob_rows
from pagestream_engine.step.records import StepLogprobs


def test_each_token_of_a_sample_has_its_own_row() -> None:
    given = StepLogprobs(
        samples=np.array([1, 1, 4], np.int32),
        counts=np.array([1, 1, 0], np.int32),
        token_ids=np.array([[7, 9], [3, 3], [5, 0]], np.int32),
        logprobs=np.array([[-2.0, -0.5], [-0.25, -0.25], [-1.0, 0.0]], np.float32),
        ranks=np.array([2, 1, 6], np.int32),
    )
    rows = {sample: [row.with_texts(None) for row in rows] for sample, rows in logprob_rows(given).items()}
    assert rows == {
        1: [
            (TokenLogprob(7, -2.0, 2, ""), TokenLogprob(9, -0.5, 1, "")),
            (TokenLogprob(3, -0.25, 1, ""), TokenLogprob(3, -0.25, 1, "")),
        ],
        4: [(TokenLogprob(5, -1.0, 6, ""),)],
    }
