"""A thousand chats at once, over HTTP, to `pagestream serve` with the demo model: errors, TTFT and ITL.

Everything is real and at its defaults: gateway, Redis, worker and engine, each a process; one process is the client.
All streams are opened at the same moment, far more than the engine has seats for, so the time to the first token is
mostly the queue's.

    PYTHONPATH=tests python tests/benchmarks/thousand_streams.py [--streams 1000] [--tokens 64] [-- SERVE OPTIONS]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

import uvloop
from goals import print_goal
from support.clients.many_streams import StreamRecord, open_at_once
from support.faults.served import running_serve

LIMIT_S = 1800.0


def spread(seconds: Sequence[float]) -> str:
    """Return the distribution in milliseconds."""
    cuts = quantiles(seconds, n=1000)
    shown = {"p10": 99, "p50": 499, "p90": 899, "p99": 989, "p99.9": 998}
    parts = [f"{name} {cuts[place] * 1e3:,.0f}" for name, place in shown.items()]
    return ", ".join([*parts, f"max {max(seconds) * 1e3:,.0f} ms"])


def report(records: Sequence[StreamRecord]) -> int:
    """Print the figures; return the number of streams with an error."""
    errors = [record.error for record in records if record.error]
    wall_s = max(record.ended_s for record in records)
    num_tokens = sum(record.num_tokens for record in records)
    print(f"{len(records)} streams, {num_tokens} tokens in {wall_s:.1f} s ({num_tokens / wall_s:.0f} a second)")
    for error, count in Counter(errors).most_common(5):
        print(f"error, {count} times: {error}")
    firsts = [record.ttft_s for record in records if record.ttft_s is not None]
    gaps = [gap for record in records for gap in record.itl_s]
    if len(firsts) > 1:
        print("TTFT:", spread(firsts))
    if len(gaps) > 1:
        print("ITL: ", spread(gaps))
    print_goal("streams at once without an error", "1,000", f"{len(records)}, {len(errors)} errors")
    return len(errors)


def main() -> int:
    """Run the benchmark; return 1 where a stream had an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("serve", nargs="*", metavar="OPTION", help="of pagestream serve, after --")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_serve(Path(folder), "--dtype", "auto", *options.serve) as served,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        url = served.record.http_urls()[0]
        records = runner.run(open_at_once(url, "demo", options.streams, options.tokens, LIMIT_S))
        return 1 if report(records) else 0


if __name__ == "__main__":
    sys.exit(main())
