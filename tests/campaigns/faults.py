"""Random kills under continuous load: `make faults-campaign SEED=1 KILLS=1000`.

The results are written to a file after each fault, from which an interrupted campaign resumes.
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
from support.faults.campaign_results import CampaignResults
from support.faults.cluster import running_cluster

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".fault-campaign"
REPORT_EVERY_KILLS = 10


async def run(results: CampaignResults, state: Path, *, kills: int, minutes: float, streams: int, storm: bool) -> None:
    """Run until the results have `kills` kills, or `minutes` are over."""
    reported = results.kills

    def save() -> None:
        nonlocal reported
        results.save(state)
        if results.kills >= reported + REPORT_EVERY_KILLS:
            reported = results.kills
            wrong = results.lost + results.repeated + results.different + results.quarantined
            rate = 60 * results.kills / results.seconds
            counts = f"{results.requests} requests, {results.tokens} tokens, {wrong} wrong"
            print(f"{results.kills} kills ({rate:.0f}/min), {counts}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        async with running_cluster(Path(folder)) as cluster:
            campaign = Campaign(cluster, results, streams=streams, storm=storm, save=save)
            await campaign.run(kills, time.monotonic() + 60 * minutes)


def main() -> int:
    """Run the command. Returns 1 if a client noticed a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1000, help="in total, with those of earlier legs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end this leg after this time")
    parser.add_argument("--streams", type=int, default=16, help="requests that run at any time")
    parser.add_argument("--storm", action="store_true", help="hit again while a killed engine still loads")
    parser.add_argument("--state", type=Path, help="default: .fault-campaign/SEED.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to it")
    arguments = parser.parse_args()
    # SIGINT may be ignored by the shell, and a job's limit sends SIGTERM: either has to end the parts in order.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    state = arguments.state or STATE / f"{arguments.seed}.json"
    results = CampaignResults.load(state, arguments.seed)
    try:
        options = {name: getattr(arguments, name) for name in ("kills", "minutes", "streams", "storm")}
        asyncio.run(run(results, state, **options))
    except KeyboardInterrupt:
        print("interrupted: run the same command again to resume")
    finally:
        results.save(state)
        lines = "\n".join(results.table())
        print(f"\n{lines}")
        for failure in results.failures:
            print(failure)
    if arguments.markdown is not None:
        arguments.markdown.write_text(f"{lines}\n")
    return int(not results.is_clean)


if __name__ == "__main__":
    sys.exit(main())
