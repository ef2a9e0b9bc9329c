"""What KV blocks waste on traces: the share of held slots that hold no token, as an average over time.

    PYTHONPATH=tests python tests/benchmarks/page_waste.py azure_llm_2023_conv.csv azure_llm_2023_code.csv [--short]

The engine's own scheduler and cache serve each trace on virtual time, with a step's time by the packaged profile: all
requests at once, and with arrivals stretched so that the engine is busy for 80 % of the time. No prefix is shared:
a full block is shared whole, whatever its size.
"""

from __future__ import annotations

import argparse

from pagestream_simulator.traces.files import SAMPLE, read_trace
from support.engines.trace_waste import at_load, saturated, waste

BLOCK_SIZES = (16, 32, 64, 128)
SHORT_REQUESTS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", default=[SAMPLE], help="files of traces (default: the packaged sample)")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_REQUESTS} requests of each, blocks of 16")
    options = parser.parse_args()
    print("| trace | requests | tokens a block | all at once | at 80 % load |\n|---|---|---|---|---|")
    for name in options.traces:
        rows = read_trace(name, SHORT_REQUESTS if options.short else None)
        for block_size in BLOCK_SIZES[:1] if options.short else BLOCK_SIZES:
            full, capacity_s = waste(saturated(rows), block_size)
            loaded, _ = waste(at_load(rows, capacity_s), block_size)
            print(f"| {name} | {len(rows):,} | {block_size} | {full:.2%} | {loaded:.2%} |", flush=True)


if __name__ == "__main__":
    main()
