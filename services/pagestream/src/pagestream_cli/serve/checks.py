"""Check what the parts will be started with, before any of them is."""

from __future__ import annotations

import contextlib
import io
import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from pagestream_telemetry.addresses import is_loopback

from pagestream_cli.errors import UsageError
from pagestream_cli.serve.model import REPOSITORY, model_problem
from pagestream_cli.serve.options import ServeOptions
from pagestream_cli.supervisor import PartSpec

_HINT = "`pagestream serve --help-all` lists every setting"
ENGINE_MODULE, GATEWAY_MODULE = "pagestream_worker", "pagestream_gateway"


def check_options(options: ServeOptions) -> None:
    """Check serve's own options.

    Raises:
        UsageError: they contradict each other, or name a file that is not there or that a gateway could not use.
    """
    if options.exit_after_greet and options.greet is None:
        raise UsageError("--exit-after-greet needs --greet PROMPT")
    if options.demo and not is_loopback(options.host):
        raise UsageError(f"--demo is for this machine alone, and --host is {options.host}")
    if options.demo and (options.tls_certificate is not None or options.redis_url is not None):
        raise UsageError("--demo serves without TLS, from a Redis of its own")
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
    if options.api_keys is not None:
        _check_keys(options.api_keys)
    if options.tls_certificate is not None and options.tls_key is not None:
        _check_tls(options.tls_certificate, options.tls_key)


def _check_keys(file: Path) -> None:
    from pagestream_gateway.auth.authenticator import KeyFile
    from pagestream_gateway.errors import SettingsError

    try:
        KeyFile(file)
    except SettingsError as error:
        raise UsageError(str(error), hint="`pagestream keys new TENANT --file FILE` adds a key") from error


def _check_tls(certificate: Path, key: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-certificate {certificate}: no certificate can be read: {error}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise UsageError(f"--tls-key {key} is not the key of the certificate {certificate}") from error
        raise UsageError(
            f"--tls-key {key} cannot be used with {certificate}: {error}", hint="a PEM file without a passphrase"
        ) from error


def check_parts(parts: Sequence[PartSpec]) -> None:
    """Read each part's command line and environment as the part will: engine options and PAGESTREAM_... variables; and
    compare the options with the model's configuration and this machine.

    Raises:
        UsageError: a value is unknown, malformed or out of range; it is named.
    """
    from pagestream_engine.errors import EngineError
    from pagestream_engine.preflight import check_options as check_engine_options
    from pagestream_gateway import configuration as gateway
    from pagestream_gateway.errors import SettingsError
    from pagestream_worker import settings as worker

    for part in parts:
        environment = {**os.environ, **part.env}
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                if ENGINE_MODULE in part.argv:
                    settings = worker.load_settings(_options_of(part, ENGINE_MODULE), environment)
                    _check_models(settings.worker.models)
                    check_engine_options(settings.worker.model, settings.engine)
                elif GATEWAY_MODULE in part.argv:
                    gateway.load_settings(_options_of(part, GATEWAY_MODULE), environment)
        except SystemExit as error:  # argparse has said what is wrong, below the usage of another program
            raise UsageError(said.getvalue().strip().rpartition("error: ")[2], hint=_HINT) from error
        except (EngineError, SettingsError, ValueError) as error:
            raise UsageError(str(error), hint=_HINT) from error


def _check_models(named: Sequence[str]) -> None:
    """Check the further models that engines may serve: where a folder is named, it has to hold a model."""
    for each in named:
        name, _, folder = each.partition("=")
        if (REPOSITORY.fullmatch(folder) is None or Path(folder).exists()) and (problem := model_problem(Path(folder))):
            raise UsageError(f"--models {name}={folder}: {problem}")


def _options_of(part: PartSpec, module: str) -> list[str]:
    return list(part.argv[part.argv.index(module) + 1 :])
