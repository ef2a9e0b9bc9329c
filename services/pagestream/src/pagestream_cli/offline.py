"""Runs a model in this process, without gateway, Redis and worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagestream_cli.errors import CliError
from pagestream_cli.serve.model import choose_model


def complete(model: str, prompt: str, fields: Mapping[str, Any]) -> str:
    """The completion of one prompt.

    Raises:
        UsageError: `model` is no model folder.
        CliError: the engine refuses the request.
    """
    choice = choose_model(model, None)
    from pagestream_engine import LLM, SamplingParams

    try:
        outputs = LLM(choice.source).generate([prompt], SamplingParams(**fields))
    except ValueError as error:
        raise CliError(str(error)) from error
    return outputs[0].outputs[0].text
