"""Load a causal LM through `transformers`, and find out whether and how it runs on the paged cache."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagestream_engine.attention import AttentionSpec, Backend
from pagestream_engine.errors import (
    DOWNLOAD_AGAIN,
    ModelError,
    ModelFileError,
    UnsupportedModel,
    UnsupportedOption,
    WeightsError,
)
from pagestream_engine.layers.attention import PagedAttention
from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.config import ConfigFile, ModelInfo
from pagestream_engine.models.defaults import GENERATION_CONFIG, end_tokens
from pagestream_engine.models.general.interface import PROBED_ATTENTION, register
from pagestream_engine.models.general.linears import replace_linears, restore_linears
from pagestream_engine.models.general.model import GeneralModel
from pagestream_engine.models.general.norms import take_over_norms
from pagestream_engine.models.general.probe import check_runs, probe
from pagestream_engine.models.general.rotations import fix_rotations, shortest_context
from pagestream_engine.models.model import Model
from pagestream_engine.models.source import ModelSource, Target

_log = logging.getLogger(__name__)

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_DEFAULT_CONTEXT = 2048
_CACHES = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})
"""Classes of `transformers`' caches of a layer that keep keys and values, or nothing."""


class GeneralSource(ModelSource):
    """A model without a family. `attention_specs` loads the weights already: only a run shows how its layers attend."""

    can_be_deterministic = GeneralModel.can_be_deterministic

    def __init__(self, folder: Path, file: ConfigFile) -> None:
        """Read the configuration.

        Raises:
            ModelFileError: it is malformed.
            UnsupportedModel: `transformers` has no such architecture, or none that runs on a paged cache.
        """
        quantised = file.get("quantization_config")
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise UnsupportedModel(
                f"config.json: quantization_config: given {method} for {', '.join(file.architectures)}, expected a "
                "model with a family of its own, or floats (quantization int8 rounds those)"
            )
        self._config = _read_config(folder, file)
        self._class = _find_class(file)
        _check_class(self._class, self._config)
        super().__init__(folder, _read_info(file, self._class.__name__, self._config))
        self._module: nn.Module | None = None
        self._found: tuple[AttentionSpec, ...] = ()

    def attention_specs(self, target: Target) -> Sequence[AttentionSpec]:
        sizes = {"tensor_parallel_size": target.ranks.size, "pipeline_parallel_size": target.stage.count}
        for option, size in sizes.items():
            if size > 1:
                hint = f"{self.info.architecture} runs by transformers' code, which can't be divided"
                raise UnsupportedOption(option, size, "1", hint)
        self._module = self._read_weights(target)
        with self._named():
            found = probe(self._module, target.max_model_len, self.info.vocab_size)
        replaced = replace_linears(self._module, exact=target.exact_linears, quantization=target.quantization)
        if replaced:
            try:
                with self._named():
                    check_runs(self._module, found, target.max_model_len, self.info.vocab_size)
            except UnsupportedModel:
                if target.quantization is not None:
                    raise
                restore_linears(self._module, replaced)  # Modelling code may read a linear's weight.
        self._found = tuple(found)
        return alike(found)

    def load(self, target: Target, backend: Backend) -> Model:
        specs = alike(self._found) if self._found else self.attention_specs(target)
        if self._module is None:
            raise ModelError("model: given no weights, expected attention_specs to be called before")
        take_over_norms(self._module, backend.operators)
        attentions = [PagedAttention(backend, layer, spec) for layer, spec in enumerate(specs)]
        return GeneralModel(self.info, self._module, attentions)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the architecture in errors."""
        try:
            yield
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self.info.architecture}: {error}") from error

    def _read_weights(self, target: Target) -> nn.Module:
        register()
        try:
            with _quiet():
                module, notes = self._class.from_pretrained(
                    self.folder,
                    config=self._config,
                    dtype=target.dtype,
                    attn_implementation=PROBED_ATTENTION,
                    use_safetensors=True,
                    output_loading_info=True,
                    local_files_only=True,
                    trust_remote_code=False,
                )
        except Exception as error:
            raise ModelFileError(
                f"{self.folder}: given weights that can't be loaded ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}), expected whole safetensors; {DOWNLOAD_AGAIN}"
            ) from error
        for kind, expected in (("missing_keys", "all"), ("mismatched_keys", "shapes by config.json")):
            if notes[kind]:
                names = sorted(map(str, notes[kind]))
                raise WeightsError(
                    f"weights: given {len(names)} {kind.split('_')[0]} tensors ({', '.join(names[:5])}), expected "
                    f"{expected}; {DOWNLOAD_AGAIN}"
                )
        loaded: nn.Module = module.to(target.device).eval().requires_grad_(False)
        fix_rotations(loaded, target.max_model_len)
        return loaded


def alike(specs: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """Give all layers the largest head and the most KV heads of any: one cache has one shape."""
    head_dim = max(spec.head_dim for spec in specs)
    num_kv_heads = max(spec.num_kv_heads for spec in specs)
    changed = []
    for spec in specs:
        num_heads = spec.num_heads // spec.num_kv_heads * num_kv_heads
        sinks = spec.sinks
        if sinks is not None:
            sinks = torch.nn.functional.pad(sinks, (0, num_heads - spec.num_heads))
        changed.append(replace(spec, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, sinks=sinks))
    return changed


def _read_config(folder: Path, file: ConfigFile) -> Any:
    from transformers import AutoConfig

    kind = file.get("model_type")
    try:
        with _quiet():
            # Without it a terminal is asked whether to run the folder's own code.
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UnsupportedModel(
            f"config.json: model_type: given {kind!r}, expected one that the installed transformers reads: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error


def _find_class(file: ConfigFile) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    for name in file.architectures:
        if name in known and hasattr(transformers, name):
            return getattr(transformers, name)
    raise UnsupportedModel(
        f"config.json: architectures: given {file.architectures!r}, expected a causal language model of the installed "
        "transformers"
    )


def _check_class(model_class: Any, config: Any) -> None:
    """Refuse what can't run on a paged cache, before its weights are read."""
    name = model_class.__name__
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name}: given an encoder-decoder, expected a decoder; there are no encoder inputs")
    inputs = [kind for kind in ("vision", "audio") if getattr(config, f"{kind}_config", None) is not None]
    if inputs:
        raise UnsupportedModel(f"{name}: given a model with {' and '.join(inputs)} inputs, expected one of text alone")
    if getattr(config.get_text_config(), "index_topk", None) is not None:
        raise UnsupportedModel(f"{name}: given attention to selected tokens (index_topk), expected attention to all")
    if "shared_kv_states" in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModel(f"{name}: given a draft model on another's keys and values, expected one with its own")
    if model_class._is_stateful:
        raise UnsupportedModel(f"{name}: given layers with a recurrent state, expected attention alone")
    _check_cache(name, config)
    if not model_class._supports_attention_backend:
        raise UnsupportedModel(
            f"{name}: given modelling code with an attention of its own, expected transformers' attention interface"
        )


def _check_cache(name: str, config: Any) -> None:
    """Refuse layers whose cache, as `transformers` makes it, is no keys and values of each token."""
    from transformers.cache_utils import DynamicCache

    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, TypeError, ValueError, AttributeError):
        return  # A configuration that its own class does not fit: what its layers do is seen when they run.
    others = sorted({type(layer).__name__ for layer in layers} - _CACHES)
    if others:
        raise UnsupportedModel(
            f"{name}: given layers whose cache is no keys and values of each token ({', '.join(others)}), such as a "
            "convolution's or a recurrent state, expected attention alone"
        )


def _read_info(file: ConfigFile, architecture: str, config: Any) -> ModelInfo:
    text = config.get_text_config()
    context = _context(text)
    return ModelInfo(
        architecture=architecture,
        vocab_size=int(text.vocab_size),
        max_position_embeddings=context.num_tokens,
        eos_token_ids=_ends(file, text),
        dtype=_dtype(file, config),
        extended_context=context.extended,
    )


def _ends(file: ConfigFile, text: Any) -> tuple[int, ...]:
    size = int(text.vocab_size)
    own = file.eos_token_ids(size)
    if end_tokens(GENERATION_CONFIG, file.generation) or end_tokens("config.json", file.fields):
        return own
    nested = ConfigFile(text.to_dict()).eos_token_ids(size)  # Of the language model in a larger one.
    return tuple(dict.fromkeys((*nested, *own)))


def _context(text: Any) -> RopeContext:
    context = next((getattr(text, name) for name in _CONTEXT_FIELDS if getattr(text, name, None)), _DEFAULT_CONTEXT)
    if isinstance(context, (list, tuple)):
        context = max(context)
    return shortest_context(text, int(context))


def _dtype(file: ConfigFile, config: Any) -> torch.dtype:
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else None
    return stored if stored is not None else file.dtype()


@contextmanager
def _quiet() -> Any:
    """Keep progress bars and warnings of `transformers` out of the log: what matters is raised."""
    from transformers.utils import logging as their_logging

    level, bars = their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()
    their_logging.set_verbosity(logging.ERROR)
    their_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
        if bars:
            their_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
