"""What fits, as JSON: the context that an engine would have on this machine, or the sequences that cards would hold.

    python -m pagestream_worker.capacity MODEL [engine options]
    python -m pagestream_worker.capacity --cards MODEL [--gpu NAME ...] [engine options]
    python -m pagestream_worker.capacity --check MODEL

Options and variables are those of `pagestream-engine`. The first form loads the model; the second one reads only its
configuration, and the cards need not be there. The third one reads configuration and headers, and refuses what no
engine runs.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import EngineError
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.sizing import CARDS, fewest_ranks, largest_batches, size_model

from pagestream_worker.settings import add_engine_options, engine_config

EXIT_REFUSED = 2
REFUSAL = "pagestream-engine: "
"""What the line on standard error that says why an engine would not start begins with."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the fields of `Capacity`, or with `--cards` the sizes; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pagestream_worker.capacity", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="model folder, or Hugging Face repository")
    parser.add_argument("--cards", action="store_true", help="sizes in bytes, and the largest batch by card")
    parser.add_argument("--check", action="store_true", help="only whether an engine would take the model")
    parser.add_argument("--gpu", action="append", choices=sorted(CARDS), help="with --cards: these (default: all)")
    add_engine_options(parser)
    options = parser.parse_args(arguments)
    if options.gpu and not options.cards:
        parser.error("--gpu goes with --cards")
    try:
        config = engine_config(options, os.environ)
        if options.check:
            found = checked(options.model)
        elif options.cards:
            found = card_sizes(options.model, config, options.gpu or list(CARDS))
        else:
            found = machine_capacity(options.model, config)
    except (EngineError, ValueError) as error:
        print(f"{REFUSAL}{error}", file=sys.stderr)  # noqa: T201
        return EXIT_REFUSED
    print(json.dumps(found))  # noqa: T201
    return 0


def machine_capacity(model: str, config: EngineConfig) -> dict[str, Any]:
    """Load a model; return what it could do on this machine."""
    from pagestream_engine.engine import measure_capacity  # needs torch

    return dataclasses.asdict(measure_capacity(model, config))


def checked(model: str) -> dict[str, Any]:
    """Read a model's configuration and the names of its weights; return its architecture."""
    from pagestream_engine.models.registry import open_model  # needs torch

    source = open_model(resolve_model(model))
    source.check_files()
    return {"architecture": source.info.architecture}


def card_sizes(model: str, config: EngineConfig, cards: Sequence[str]) -> dict[str, Any]:
    """Return a model's sizes in bytes, and for each card how many sequences of which contexts it holds."""
    size = size_model(model, config)
    share = config.cache.gpu_memory_utilization
    return {
        "architecture": size.architecture,
        "dtype": size.dtype,
        "quantization": config.model.quantization,
        "num_parameters": size.num_parameters,
        "weight_bytes": size.weight_bytes,
        "host_weight_bytes": size.host_weight_bytes,
        "kv_bytes_per_token": size.kv_bytes_per_token,
        "activation_bytes": size.activation_bytes,
        "max_model_len": size.max_model_len,
        "gpus": {
            name: {
                "memory_bytes": CARDS[name],
                "sequences": (held := largest_batches(size, CARDS[name], share)),
                "ranks": None if any(held.values()) else _ranks(model, config, name, min(held)),
            }
            for name in cards
        },
    }


def _ranks(model: str, config: EngineConfig, card: str, context: int) -> int | None:
    """Return the fewest cards that hold the model; None where there are none, or ranks were asked for."""
    if config.parallel.num_ranks > 1:
        return None
    found = fewest_ranks(ConfigFile.read(resolve_model(model)), config, CARDS[card], context)
    return None if found is None else found[0]


if __name__ == "__main__":
    sys.exit(main())
