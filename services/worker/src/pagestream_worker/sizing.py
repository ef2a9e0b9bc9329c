"""What a model needs, and how many sequences fit on cards, as JSON.

    python -m pagestream_worker.sizing MODEL [--gpu NAME ...] [engine options]

Options and variables are those of `pagestream-engine`. Only the model's configuration is read.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import EngineError
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.sizing import CARDS, fewest_ranks, largest_batches, size_model

from pagestream_worker.capacity import EXIT_REFUSED, REFUSAL
from pagestream_worker.settings import add_engine_options, engine_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Print sizes in bytes, and the largest batch by card and context; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pagestream_worker.sizing", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="model folder, or Hugging Face repository")
    parser.add_argument("--gpu", action="append", choices=sorted(CARDS), help="(default: all)")
    add_engine_options(parser)
    options = parser.parse_args(arguments)
    try:
        config = engine_config(options, os.environ)
        size = size_model(options.model, config)
    except (EngineError, ValueError) as error:
        print(f"{REFUSAL}{error}", file=sys.stderr)  # noqa: T201
        return EXIT_REFUSED
    share = config.cache.gpu_memory_utilization
    found = {
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
                "ranks": None if any(held.values()) else _ranks(options.model, config, name, min(held)),
            }
            for name in options.gpu or CARDS
        },
    }
    print(json.dumps(found))  # noqa: T201
    return 0


def _ranks(model: str, config: EngineConfig, card: str, context: int) -> int | None:
    """Return the fewest cards that hold the model; None where there are none, or ranks were asked for."""
    if config.parallel.num_ranks > 1:
        return None
    found = fewest_ranks(ConfigFile.read(resolve_model(model)), config, CARDS[card], context)
    return None if found is None else found[0]


if __name__ == "__main__":
    sys.exit(main())
