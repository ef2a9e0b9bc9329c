"""What larger KV blocks waste on a trace: slots of held blocks that hold no token, over all decode steps.

A request holds its prompt and what it has generated, in every step from its first token to its last; a request with
longer answers weighs more. No prefix is shared: a full block is shared whole, whatever its size.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from pagestream_engine.cache.kv_groups import full_attention
from pagestream_simulator.traces.files import SAMPLE, TraceRow, read_trace

BLOCK_SIZES = (16, 32, 64, 128)


def steps_by_length(rows: Sequence[TraceRow]) -> list[int]:
    """How many decode steps are made at each number of tokens in the cache, from 0 on."""
    changes: Counter[int] = Counter()
    for row in rows:
        changes[row.input_tokens] += 1
        changes[row.input_tokens + max(1, row.output_tokens)] -= 1
    return list(accumulate(changes[length] for length in range(max(changes) + 1)))


def waste(steps: Sequence[int], block_size: int) -> float:
    """The share of all held slots that hold no token."""
    layout = full_attention(block_size)
    held = sum(count * layout.num_blocks_for(length) * block_size for length, count in enumerate(steps) if count)
    return 1.0 - sum(count * length for length, count in enumerate(steps)) / held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", default=[SAMPLE], help="files of traces (default: the packaged sample)")
    for name in parser.parse_args().traces:
        steps = steps_by_length(read_trace(name))
        shares = ", ".join(f"{size}: {waste(steps, size):.2%}" for size in BLOCK_SIZES)
        print(f"{name}: waste by tokens a block: {shares}")


if __name__ == "__main__":
    main()
