"""The context that an engine would have on this machine, as JSON.

    python -m pagestream_worker.capacity MODEL [engine options]

Options and variables are those of `pagestream-engine`. The model is loaded.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from pagestream_engine.engine import measure_capacity
from pagestream_engine.errors import EngineError

from pagestream_worker.settings import add_engine_options, engine_config

EXIT_REFUSED = 2
REFUSAL = "pagestream-engine: "
"""What the line on standard error that says why an engine would not start begins with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the fields of `Capacity`; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pagestream_worker.capacity", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="model folder, or Hugging Face repository")
    add_engine_options(parser)
    options = parser.parse_args(arguments)
    try:
        capacity = measure_capacity(options.model, engine_config(options, os.environ))
    except (EngineError, ValueError) as error:
        print(f"{REFUSAL}{error}", file=sys.stderr)  # noqa: T201
        return EXIT_REFUSED
    print(json.dumps(dataclasses.asdict(capacity)))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
