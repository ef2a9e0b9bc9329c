"""The options of `pagestream simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path

LAWS = ("optimum", "fixed", "pagestream", "hpa", "keda")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of simulate."""
    parser.add_argument("trace", metavar="TRACE", help="Azure's csv or Mooncake's jsonl; `sample` is ours")
    what = parser.add_argument_group("what serves")
    what.add_argument(
        "--engines-at-peak",
        type=int,
        default=20,
        metavar="N",
        help="scale arrivals so that a fixed fleet needs N (default: %(default)s)",
    )
    what.add_argument(
        "--startup", type=float, default=8.0, metavar="S", help="a pod's creation to ready (default: %(default)s)"
    )
    what.add_argument("--profile", type=Path, metavar="FILE", help="of the engine (default: ours, see docs)")
    how = parser.add_argument_group("how it is scaled")
    how.add_argument(
        "--laws",
        nargs="+",
        choices=LAWS,
        default=list(LAWS),
        metavar="LAW",
        help=f"of {', '.join(LAWS)} (default: all)",
    )
    how.add_argument("--policy", type=Path, metavar="FILE", help="JSON: what differs from our law's default policy")
    how.add_argument(
        "--terms", type=Path, metavar="FILE", help="TOML: objective and circumstances (default: the study's)"
    )
    how.add_argument("--plan-changes", type=int, default=100, metavar="N", help="tried for the optimum (default: 100)")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of copies and partitions (default: 0)")
    out = parser.add_argument_group("results")
    out.add_argument("--output", type=Path, metavar="FILE", help="write all numbers as JSON")
    out.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG plot")
