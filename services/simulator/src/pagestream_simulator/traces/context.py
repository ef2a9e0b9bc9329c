"""Shrinks a trace's lengths to a model's context, so that a small model sees the shape of a large one's traffic.

All lengths are multiplied by one factor, context / (99th percentile of prompt + output), never above 1: the proportions
between requests and between prompt and output stay. The one request in a hundred that is still too long is shrunk
further, to the context. No length falls below one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.traces.files import TraceRow

PERCENTILE = 99.0
"""With the maximum instead, one outlier would make all others tiny: in the Azure conversation trace it is 3.3 times
this percentile.
"""


def scale_factor(rows: Sequence[TraceRow], context: int) -> float:
    """Return the factor for all lengths, at most 1."""
    return min(1.0, context / float(np.percentile([row.input_tokens + row.output_tokens for row in rows], PERCENTILE)))


def scale_to_context(rows: Sequence[TraceRow], context: int) -> list[TraceRow]:
    """Return the requests with prompt + output within `context` tokens.

    Raises:
        SettingInvalidError: `context` has no room for a prompt and an output.
    """
    if context < 2:
        raise SettingInvalidError(
            f"a context of {context} tokens has no room for a prompt and an output; at least 2 are expected"
        )
    factor = scale_factor(rows, context)
    return [_fit(row, factor, context) for row in rows]


def _fit(row: TraceRow, factor: float, context: int) -> TraceRow:
    own = min(factor, context / (row.input_tokens + row.output_tokens))
    output = min(max(round(row.output_tokens * own), 1), context - 1)
    prompt = min(max(round(row.input_tokens * own), 1), context - output)
    return replace(
        row, input_tokens=prompt, output_tokens=output, block_tokens=max(round(row.block_tokens * factor), 1)
    )
