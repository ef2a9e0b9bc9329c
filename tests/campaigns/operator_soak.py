"""Two replicas of the operator on a bad day: pools change at random while what lies around the operator fails.

    make soak MINUTES=60 SEED=1

A real API server, etcd and controllers; nodes and kubelets are pretended. Each replica reaches the API server through
toxiproxy, which cuts, delays, resets and truncates, and through a layer that answers 429, 500 and 503, or loses the
answers of calls that took effect. API server, etcd and one replica are killed and started again; the other replica runs
all the time, so that its memory shows what it keeps.

A round is a burst of faults with orders in it (`soaking/orders.py`: create, change, pin, load, delete, ...), then a
wait until all pools are as ordered. Wanted: within 30 s of the last fault each pool has its last template and the pods
that its spec or the law asks for, what was deleted is gone, one replica leads; and in all rounds no two replicas lead
at a time, none has ended by itself, and the memory stays. The exit status is 1 otherwise. Orders and faults are the
same for a seed, as far as the machine's speed lets them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from campaigns.soaking.rounds import CONVERGED_S, soak

_FIGURES = "## What came\n"
"""The last heading of a page, under which figures stand."""


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=CONVERGED_S, help="from the last fault to the last pool")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--write", type=Path, help="page whose figures are replaced")
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes; else they are removed")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = given.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            report = soak(folder, minutes=given.minutes, seed=given.seed, limit_s=given.limit_s)
        except pytest.skip.Exception as error:
            sys.exit(f"a program is missing: {error}")
    print(report.table())
    if given.json is not None:
        given.json.write_text(json.dumps(vars(report), indent=1) + "\n")
    if given.write is not None:
        given.write.write_text(f"{given.write.read_text().partition(_FIGURES)[0]}{_FIGURES}\n{report.table()}\n")
    for failure in report.failures:
        print(failure)
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
