"""The options that generate and chat share: the server, and the sampling parameters."""

from __future__ import annotations

import argparse
from typing import Any

from pagestream_cli.client.endpoint import KEY_VARIABLES

KEYS = ", ".join(f"${name}" for name in KEY_VARIABLES)
FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
"""Sampling parameters with an option, by the names of the API."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the server to call."""
    parser.add_argument(
        "--url", metavar="URL", help="a gateway's base URL (default: the serve that runs in the data folder)"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="the data folder of that serve")
    parser.add_argument("--api-key", metavar="KEY", help=f"default: the first of {KEYS} that is set")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="served name (default: that of serve, else the only one with engines)",
    )


def add_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the sampling options. Those that are not given have the model's defaults."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="most tokens of the answer (default: %(default)s)",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="nucleus probability in (0, 1]")
    parser.add_argument("--top-k", type=int, metavar="K", help="number of candidate tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )


def fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given."""
    return {name: value for name in FIELDS if (value := getattr(arguments, name)) is not None}
