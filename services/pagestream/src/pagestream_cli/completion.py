"""`pagestream completion`: what a shell needs to complete the commands and their options."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of completion."""
    parser.epilog = 'bash: eval "$(pagestream completion bash)" in ~/.bashrc; zsh: write it to _pagestream in $fpath.'
    parser.add_argument("shell", choices=SHELLS, help="the shell that completes")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from pagestream_cli.__main__ import build_parser

    print(shtab.complete(build_parser(), shell=arguments.shell))
    return 0
