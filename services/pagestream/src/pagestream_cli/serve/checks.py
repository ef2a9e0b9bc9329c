"""Check what the parts will be started with, before any of them is."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence

from pagestream_cli.errors import UsageError
from pagestream_cli.serve.options import ServeOptions
from pagestream_cli.supervisor import PartSpec

_HINT = "`pagestream serve --help-all` lists every setting"
ENGINE_MODULE, GATEWAY_MODULE = "pagestream_worker", "pagestream_gateway"


def check_options(options: ServeOptions) -> None:
    """Check serve's own options.

    Raises:
        UsageError: they contradict each other, or name a file that is not there.
    """
    if options.exit_after_greet and options.greet is None:
        raise UsageError("--exit-after-greet needs --greet PROMPT")
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise UsageError("--tls-certificate and --tls-key go together", hint="give both, or neither")
    files = {
        "--api-keys": options.api_keys,
        "--tls-certificate": options.tls_certificate,
        "--tls-key": options.tls_key,
    }
    for flag, file in files.items():
        if file is not None and not file.is_file():
            raise UsageError(f"{flag} {file}: no such file")


def check_parts(parts: Sequence[PartSpec]) -> None:
    """Read each part's command line and environment as the part will: engine options and PAGESTREAM_... variables.

    Raises:
        UsageError: a value is unknown, malformed or out of range; it is named.
    """
    from pagestream_engine.errors import EngineError
    from pagestream_gateway import settings as gateway
    from pagestream_gateway.errors import SettingsError
    from pagestream_worker import settings as worker

    for part in parts:
        environment = {**os.environ, **part.env}
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                if ENGINE_MODULE in part.argv:
                    worker.load_settings(_options_of(part, ENGINE_MODULE), environment)
                elif GATEWAY_MODULE in part.argv:
                    gateway.load_settings(_options_of(part, GATEWAY_MODULE), environment)
        except SystemExit as error:  # argparse has said what is wrong, below the usage of another program
            raise UsageError(said.getvalue().strip().rpartition("error: ")[2], hint=_HINT) from error
        except (EngineError, SettingsError, ValueError) as error:
            raise UsageError(str(error), hint=_HINT) from error


def _options_of(part: PartSpec, module: str) -> list[str]:
    return list(part.argv[part.argv.index(module) + 1 :])
