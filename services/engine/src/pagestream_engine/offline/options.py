"""vLLM's names of an engine's options: what they are called here, and those that may be given and change nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, make_dataclass
from pathlib import Path
from typing import Any, Self

from pagestream_engine.config import (
    AdapterConfig,
    CacheConfig,
    EngineOptions,
    ExecutorConfig,
    ExtensionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from pagestream_engine.errors import ConfigError, ModelFileError
from pagestream_engine.models.published import quantization_of

_GROUPS: tuple[Any, ...] = (
    ModelConfig,
    CacheConfig,
    SchedulerConfig,
    SpeculationConfig,
    ExecutorConfig,
    ParallelConfig,
    ExtensionConfig,
    AdapterConfig,
)
SPECULATION = {
    "method": "speculative_method",
    "model": "speculative_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_max": "prompt_lookup_max",
}
"""Members of `speculative_config`, and the options that they are."""
_AWQ, _GPTQ, _MODELOPT = ("awq",), ("gptq",), ("modelopt", "modelopt_fp4")
_METHODS: Mapping[str, tuple[str, ...]] = {
    "awq": _AWQ,
    "awq_marlin": _AWQ,
    "auto_awq": _AWQ,
    "cpu_awq": _AWQ,
    "gptq": _GPTQ,
    "gptq_marlin": _GPTQ,
    "auto_gptq": _GPTQ,
    "moe_wna16": _AWQ + _GPTQ,
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "fbgemm_fp8": ("fbgemm_fp8",),
    "fp8": ("fp8",),
    "mxfp4": ("mxfp4",),
    "gpt_oss_mxfp4": ("mxfp4",),
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "petit_nvfp4": _MODELOPT,
}
"""vLLM's names of methods in which checkpoints are quantised, and what config.json calls them."""
_NVFP4 = ("modelopt_fp4", "petit_nvfp4")
"""Of those, the names that mean weights of 4 bits alone."""
_BOOLS = (False, True)
_ANY = object()
_IDLE: Mapping[str, tuple[object, ...]] = {
    "tokenizer_mode": ("auto", "hf"),
    "skip_tokenizer_init": (False,),
    "trust_remote_code": _BOOLS,  # no code of a model's is run
    "tokenizer_revision": (),
    "load_format": ("auto", "safetensors"),
    "config_format": ("auto", "hf"),
    "task": ("auto", "generate", "embed", "classify", "score"),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed", "classify"),
    "enable_chunked_prefill": _BOOLS,  # prompts are always computed in chunks
    "disable_log_stats": _BOOLS,
    "disable_log_requests": _BOOLS,
    "enable_log_requests": _BOOLS,
    "disable_custom_all_reduce": _BOOLS,
    "disable_async_output_proc": _BOOLS,
    "enable_sleep_mode": _BOOLS,  # `sleep` is there in any case
    "disable_chunked_mm_input": _BOOLS,
    "distributed_executor_backend": ("mp", "uni"),
    "data_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "guided_decoding_backend": ("auto", "guidance"),
    "structured_outputs_config": ({}, {"backend": "auto"}, {"backend": "guidance"}),
    "generation_config": ("auto",),
    "override_generation_config": ({},),
    "hf_overrides": ({},),
    "hf_token": (False,),
    "compilation_config": ({},),
    "max_seq_len_to_capture": (_ANY,),
    "allowed_local_media_path": ("",),
    "limit_mm_per_prompt": (_ANY,),  # models of text alone
    "mm_processor_kwargs": ({},),
    "override_pooler_config": (),
    "pooler_config": (),
    "logits_processors": ([],),
    "model_impl": ("auto",),
}
"""Options of vLLM's that have no effect, each with the values that may be given beside None."""
_OWN_NAMES = frozenset(each.name for group in _GROUPS for each in fields(group))


class VllmOptions(EngineOptions, total=False):
    """`EngineOptions`, and names of vLLM's `EngineArgs` that are translated or change nothing."""

    speculative_config: dict[str, Any] | str | None
    revision: str | None
    tokenizer: str | None
    tokenizer_mode: str
    skip_tokenizer_init: bool
    trust_remote_code: bool
    tokenizer_revision: str | None
    load_format: str
    config_format: str
    task: str
    runner: str
    convert: str
    enable_chunked_prefill: bool | None
    disable_log_stats: bool
    disable_log_requests: bool
    enable_log_requests: bool
    disable_custom_all_reduce: bool
    disable_async_output_proc: bool
    enable_sleep_mode: bool
    disable_chunked_mm_input: bool
    distributed_executor_backend: str | None
    data_parallel_size: int
    enable_expert_parallel: bool
    guided_decoding_backend: str
    structured_outputs_config: dict[str, Any] | None
    generation_config: str
    override_generation_config: dict[str, Any] | None
    hf_overrides: dict[str, Any] | None
    hf_token: bool | None
    compilation_config: Any
    max_seq_len_to_capture: int
    allowed_local_media_path: str
    limit_mm_per_prompt: Any
    mm_processor_kwargs: dict[str, Any] | None
    override_pooler_config: Any
    pooler_config: Any
    logits_processors: Any
    model_impl: str


def translate(model: str | Path, given: Mapping[str, Any]) -> tuple[str | Path, dict[str, Any]]:
    """Return the model, with its revision, and the options of `EngineConfig.from_options`.

    Raises:
        ConfigError: an option of vLLM's asks for something that is not there; `.field` names it.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in _IDLE:
            _check_idle(name, value)
        elif name == "speculative_config":
            continue
        elif name == "tokenizer":
            if value is not None and str(value) != str(model):
                raise ConfigError("tokenizer", value, "None: a model has the tokenizer of its folder")
        elif name == "quantization" and is_of_checkpoint(model, value):
            continue
        elif name == "revision":
            model = _revised(model, value)
        elif value is not None or name not in _OWN_NAMES or _DEFAULTS[name] is None:
            options[name] = value
    return model, {**options, **dict(_speculation(given.get("speculative_config"), given))}


def is_of_checkpoint(model: str | Path, quantization: object) -> bool:
    """Whether vLLM's name of a quantisation means that of the model's checkpoint, which needs no option here.

    A repository has no config.json yet: its own method is taken when it is loaded.

    Raises:
        ConfigError: vLLM knows the method, and the checkpoint has another, or none.
    """
    methods = _METHODS.get(str(quantization))
    if methods is None:
        return False
    folder = Path(model).expanduser()
    file = folder / "config.json"
    if not file.is_file():
        return True  # a repository, or a folder whose fault is said when it is opened
    try:
        given = quantization_of(folder, json.loads(file.read_text()))
    except (OSError, ValueError, AttributeError, ModelFileError):
        return True
    given = given if isinstance(given, Mapping) else {}
    method = given.get("quant_method")
    has_4_bits = method not in _MODELOPT or given.get("quant_algo") == "NVFP4"
    if method not in methods or (quantization in _NVFP4 and not has_4_bits):
        algorithm = f" ({given['quant_algo']})" if given.get("quant_algo") else ""
        expected = f"None: the checkpoint {model} is quantised by {method or 'no method'}{algorithm}"
        raise ConfigError("quantization", quantization, expected, "int8 quantises while loading")
    return True


def _check_idle(name: str, value: object) -> None:
    allowed = _IDLE[name]
    if value is None or _ANY in allowed or any(value == each and type(value) is type(each) for each in allowed):
        return
    shown = ", ".join(["None", *(repr(each) for each in allowed)])
    raise ConfigError(name, value, f"one of {shown}", "the option is vLLM's, and no other value has a meaning here")


def _speculation(value: object, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError("speculative_config", value, "a JSON object") from error
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ConfigError("speculative_config", value, f"a dictionary with {', '.join(SPECULATION)}")
    chosen = {name: each for name, each in value.items() if each is not None}
    unknown = sorted(set(chosen) - set(SPECULATION))
    if unknown:
        expected = f"only {', '.join(SPECULATION)}"
        raise ConfigError("speculative_config", {unknown[0]: chosen[unknown[0]]}, expected)
    for name, option in SPECULATION.items():
        if name not in chosen:
            continue
        if given.get(option) not in (None, _DEFAULTS[option], chosen[name]):
            raise ConfigError("speculative_config", {name: chosen[name]}, f"{option} in one of the two places")
        yield option, chosen[name]


def _revised(model: str | Path, revision: object) -> str | Path:
    if revision is None:
        return model
    if not isinstance(revision, str) or isinstance(model, Path) or Path(model).expanduser().exists() or "@" in model:
        raise ConfigError("revision", revision, "None, or a branch, tag or commit of a Hugging Face repository")
    return f"{model}@{revision}"


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes `--max_model_len` for `--max-model-len`, as vLLM's does."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `argparse`."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_dashed(each) for each in given], namespace)


def _dashed(argument: str) -> str:
    name, separator, value = argument.partition("=")
    return name.replace("_", "-") + separator + value if name.startswith("--") else argument


class _EngineArgs:
    """Arguments of an engine by vLLM's names; None, and values left out, are the defaults.

    Which there are: `EngineOptions`, and `VllmOptions`.
    """

    model: str

    @classmethod
    def add_cli_args(cls, parser: Any) -> Any:
        """Add an argument for each field to a parser or a group of one, and return it."""
        for each in fields(cls):  # type: ignore[arg-type]
            parser.add_argument(f"--{each.name.replace('_', '-')}", default=each.default, **_argument(each))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the arguments that a parser has found."""
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def options(self) -> dict[str, Any]:
        """Return all but the model, as `LLM` takes them."""
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names if name != "model"}


def _argument(each: Field[Any]) -> dict[str, Any]:
    kind = str(each.type)
    if "dict" in kind:
        return {"type": json.loads}
    if "bool" in kind:
        return {"action": argparse.BooleanOptionalAction}
    if "Sequence" in kind or "list" in kind:
        return {"nargs": "*"}
    return {"type": int if "int" in kind else float if "float" in kind else str}


def _default_of(each: Field[Any]) -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default


_DEFAULTS = {each.name: _default_of(each) for group in _GROUPS for each in fields(group)}
_VLLM_NAMES = [name for name in VllmOptions.__annotations__ if name not in _OWN_NAMES]
EngineArgs = make_dataclass(
    "EngineArgs",
    [
        ("model", "str", field(default="")),
        *((each.name, str(each.type), field(default=_default_of(each))) for group in _GROUPS for each in fields(group)),
        *((name, str(VllmOptions.__annotations__[name]), field(default=None)) for name in _VLLM_NAMES),
    ],
    bases=(_EngineArgs,),
)
EngineArgs.__module__ = __name__
EngineArgs.__doc__ = _EngineArgs.__doc__
