"""Random kills under continuous load: `make faults-campaign SEED=1 KILLS=1000`.

What it has counted is kept in a file after each hit, so a campaign that is interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.faults.campaign import Campaign
from support.faults.cluster import running_cluster
from support.faults.tally import Tally

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".fault-campaign"
REPORT_EVERY_KILLS = 10


async def run(tally: Tally, state: Path, *, kills: int, minutes: float, streams: int, storm: bool) -> None:
    """Go on until the tally has so many kills, or the time is over."""
    told = tally.kills

    def save() -> None:
        nonlocal told
        tally.save(state)
        if tally.kills >= told + REPORT_EVERY_KILLS:
            told = tally.kills
            wrong = tally.lost + tally.repeated + tally.different + tally.quarantined
            rate = 60 * tally.kills / tally.seconds
            counts = f"{tally.requests} requests, {tally.tokens} tokens, {wrong} wrong"
            print(f"{tally.kills} kills ({rate:.0f}/min), {counts}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        async with running_cluster(Path(folder)) as cluster:
            campaign = Campaign(cluster, tally, streams=streams, storm=storm, save=save)
            await campaign.run(kills, time.monotonic() + 60 * minutes)


def main() -> int:
    """Run the command; 1 where a client could tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1000, help="in all, with those of earlier legs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end this leg after so long")
    parser.add_argument("--streams", type=int, default=16, help="requests that run at any time")
    parser.add_argument("--storm", action="store_true", help="hit again while a killed engine still loads")
    parser.add_argument("--state", type=Path, help="default: .fault-campaign/SEED.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to it")
    arguments = parser.parse_args()
    # Also where a shell has it ignored, and where a job's limit is over: the parts have to be ended in order.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    state = arguments.state or STATE / f"{arguments.seed}.json"
    tally = Tally.load(state, arguments.seed)
    try:
        options = {name: getattr(arguments, name) for name in ("kills", "minutes", "streams", "storm")}
        asyncio.run(run(tally, state, **options))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here")
    finally:
        tally.save(state)
        lines = "\n".join(tally.table())
        print(f"\n{lines}")
        for failure in tally.failures:
            print(failure)
    if arguments.markdown is not None:
        arguments.markdown.write_text(f"{lines}\n")
    return int(not tally.is_clean)


if __name__ == "__main__":
    sys.exit(main())
