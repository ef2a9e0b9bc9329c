"""The options of `pagestream demo`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

KINDS = ("engine", "gateway", "redis")
"""What may be killed."""
MOST_STREAMS = 64
MOST_TOKENS = 1 << 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of demo."""
    parser.epilog = "Exit code: 0 all streams are identical to the undisturbed ones, 1 one differs."
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="model folder, or Hugging Face repository (default: the demo model)"
    )
    parser.add_argument(
        "--streams", type=_number(1, MOST_STREAMS), default=8, metavar="N", help="streams (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=_number(16, MOST_TOKENS),
        default=800,
        metavar="N",
        help="tokens of each (default: %(default)s)",
    )
    parser.add_argument(
        "--kill",
        type=_kinds,
        default=KINDS,
        metavar="LIST",
        help=f"what is killed, in this order, at equal distances: of {', '.join(KINDS)} (default: each once)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the first stream; the others follow")
    parser.add_argument("--dtype", default="float32", metavar="TYPE", help="of the engines (default: %(default)s)")
    parser.add_argument("--data-dir", metavar="DIR", help="data folder (default: one that is removed afterwards)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} was given, expected are {', '.join(KINDS)}, with commas")
    return kinds


def _number(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} was given, expected is a number from {least} to {most}")
        return value

    return number
