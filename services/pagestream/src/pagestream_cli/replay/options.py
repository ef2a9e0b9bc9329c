"""The options of `pagestream replay`."""

from __future__ import annotations

import argparse

from pagestream_cli import store

LIMIT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of replay."""
    parser.epilog = "Exit code: 0 equal, 1 different, 2 it could not be compared."
    parser.add_argument("request_id", metavar="ID", help="a finished request whose log is still kept")
    parser.add_argument("--tenant", metavar="NAME", default="default", help="whose it is (default: %(default)s)")
    store.add_arguments(parser)
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="generate in this process from this model folder (default: the running deployment generates a copy)",
    )
    parser.add_argument("--dtype", default="auto", help="with --model: as the engine's (default: %(default)s)")
    parser.add_argument("--deterministic", action="store_true", help="with --model: as the engine's")
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=float,
        default=LIMIT_S,
        help="without --model: longest wait for the copy (default: %(default)g)",
    )
