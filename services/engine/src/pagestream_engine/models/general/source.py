"""Load a causal LM through `transformers`, and find out whether and how it runs on the paged cache.

A model's attention is found out by running it: heads, sizes, scale, window, soft cap and sinks of each layer. Short
runs in float32 also show whether tokens meet in attention alone, by three means of which each suffices: their
operations (`TokenMixing`), the way of NaN through them, and results beside others, which are those alone.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pagestream_engine.attention import AttentionSpec, Backend, PagedAttention
from pagestream_engine.errors import (
    DOWNLOAD_AGAIN,
    ModelError,
    ModelFileError,
    UnsupportedModel,
    UnsupportedOption,
    WeightsError,
)
from pagestream_engine.layers.quantised import QuantisedWeight
from pagestream_engine.layers.rope import RopeContext
from pagestream_engine.models.config import ConfigFile, ModelInfo
from pagestream_engine.models.defaults import GENERATION_CONFIG, end_tokens
from pagestream_engine.models.general.experts import experts_of, take_over_experts
from pagestream_engine.models.general.mixing import TokenMixing, count_of_tokens
from pagestream_engine.models.general.model import (
    ATTENTION,
    PROBED_ATTENTION,
    AttentionCall,
    GeneralModel,
    MaskFunction,
    MaskRecorder,
    call_packed,
    fix_rotations,
    mask_maker,
    register,
    replace_linears,
    restore_linears,
    set_answerer,
    set_implementation,
    shortest_context,
    take_over_norms,
)
from pagestream_engine.models.loader import WeightReader
from pagestream_engine.models.model import Model, ModelSource, Target
from pagestream_engine.models.nested import text_tensors
from pagestream_engine.models.published import read_by_transformers
from pagestream_engine.models.quantised.scheme import Scheme
from pagestream_engine.models.quantised.tensors import dequantise
from pagestream_engine.models.safetensors_file import Entry, open_files

_log = logging.getLogger(__name__)

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_DEFAULT_CONTEXT = 2048
_ATTENTIONS = frozenset({"attention", "chunked_attention", "full_attention", "sliding_attention"})
"""Kinds of layers without a state. A class that has others, too, runs where a model has these alone."""
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
        self._scheme = Scheme.read(file)
        self._config = _read_config(folder, file)
        self._is_nested = file.outer is not None
        self._is_alone = self._is_nested and bool(file.architectures)
        """Whether a larger checkpoint's language model is loaded by its own class, which computes the same."""
        if self._is_alone:
            self._config = self._config.get_text_config()
            self._config.tie_word_embeddings = file.flag("tie_word_embeddings", False)
        self._class = _find_class(file, is_whole=self._is_nested and not self._is_alone)
        _check_class(self._class, self._config, is_nested=self._is_nested)
        for config in (self._config, self._config.get_text_config()):
            config.__dict__.pop("quantization_config", None)  # the weights are read here
        super().__init__(folder, _read_info(file, self._class.__name__, self._config))
        self._module: nn.Module | None = None
        self._found: tuple[AttentionSpec, ...] = ()
        self._quantised: Mapping[str, QuantisedWeight] = {}

    def weight_bytes(self, target: Target) -> int:
        if self._scheme is None:
            return super().weight_bytes(target)
        return sum(_elements(self._scheme, *each) for each in self.tensors().items()) * target.dtype.itemsize

    def tensors(self) -> dict[str, Entry]:
        entries = super().tensors()
        return text_tensors(entries) if self._is_alone else entries

    def attention_specs(self, target: Target) -> Sequence[AttentionSpec]:
        sizes = {"tensor_parallel_size": target.ranks.size, "pipeline_parallel_size": target.stage.count}
        for option, size in sizes.items():
            if size > 1:
                hint = f"{self.info.architecture} runs by transformers' code, which can't be divided"
                raise UnsupportedOption(option, size, "1", hint)
        self._module = self._read_weights(target)
        with self._named():
            found = probe(self._module, target.max_model_len, self.info.vocab_size)
        take_over_experts(self._module, target.quantization, self._quantised)
        replaced = replace_linears(
            self._module, exact=target.exact_linears, quantization=target.quantization, stored=self._quantised
        )
        if replaced or any(experts_of(self._module)):
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
                    **self._weights(target),
                    config=self._config,
                    dtype=target.dtype,
                    attn_implementation=PROBED_ATTENTION,
                    use_safetensors=True,
                    output_loading_info=True,
                    local_files_only=True,
                    trust_remote_code=False,
                )
        except ModelError:
            raise
        except ImportError as error:
            raise UnsupportedModel(
                f"{self.info.architecture}: given modelling code that needs a package which isn't installed: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error
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
        if self._is_nested and not self._is_alone:
            _drop_others(module)
        loaded: nn.Module = module.to(target.device).eval().requires_grad_(False)
        fix_rotations(loaded, target.max_model_len)
        return loaded

    def _weights(self, target: Target) -> dict[str, Any]:
        """Return where `from_pretrained` finds the weights: in the folder, or dequantised in memory."""
        entries = self.tensors()
        if self._scheme is None:
            if not self._is_alone:
                return {"pretrained_model_name_or_path": self.folder}
            with open_files() as files:
                reader = WeightReader(entries, files, target)
                floats = {name: reader.raw(name).to(target.dtype) for name in entries}
            return {"pretrained_model_name_or_path": None, "state_dict": floats}
        self._scheme.check_options(target.quantization, offloads=target.offload is not None)
        with open_files() as files:
            reader = WeightReader(entries, files, target, self._scheme)
            shapes = {name: entry.shape for name, entry in entries.items()}
            found = dequantise(reader, self._scheme, shapes, target.dtype)
        self._quantised = found.linears
        return {"pretrained_model_name_or_path": None, "state_dict": found.tensors}


def _elements(scheme: Scheme, name: str, entry: Entry) -> int:
    """Return how many numbers a stored tensor stands for."""
    size = prod(entry.shape)
    if entry.dtype == torch.int32:
        return size * 32 // scheme.bits
    return 2 * size if entry.dtype == torch.uint8 and not name.endswith("_scales") else size


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
    with _quiet():
        return read_by_transformers(folder, file.fields if file.outer is None else file.outer)


def _find_class(file: ConfigFile, *, is_whole: bool) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    known, names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), file.architectures
    if is_whole and file.outer is not None:  # it may compute more of its output than its language model does
        known |= set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
        names = ConfigFile(file.outer).architectures
    for name in names:
        if name in known and hasattr(transformers, name):
            return getattr(transformers, name)
    raise UnsupportedModel(
        f"config.json: architectures: given {names!r}, expected a causal language model of the installed transformers"
    )


def _drop_others(module: Any) -> None:
    """Free what of a loaded model is no part of its language model."""
    decoder = module.get_decoder()
    kept = {id(each) for each in decoder.modules()}
    for name, child in list(module.base_model.named_children()):
        if child is not decoder and not any(id(each) in kept for each in child.modules()):
            setattr(module.base_model, name, nn.Identity())


def _check_class(model_class: Any, config: Any, *, is_nested: bool) -> None:
    """Refuse what can't run on a paged cache, before its weights are read.

    Args:
        is_nested: whether the language model alone of the class runs, as text.
    """
    name = model_class.__name__
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name}: given an encoder-decoder, expected a decoder; there are no encoder inputs")
    inputs = [kind for kind in ("vision", "audio") if getattr(config, f"{kind}_config", None) is not None]
    if inputs and not is_nested:
        raise UnsupportedModel(f"{name}: given a model with {' and '.join(inputs)} inputs, expected one of text alone")
    if getattr(config.get_text_config(), "index_topk", None) is not None:
        raise UnsupportedModel(f"{name}: given attention to selected tokens (index_topk), expected attention to all")
    if "shared_kv_states" in inspect.signature(model_class.forward).parameters:
        raise UnsupportedModel(f"{name}: given a draft model on another's keys and values, expected one with its own")
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    if model_class._is_stateful and not (types and _ATTENTIONS.issuperset(types)):
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
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk is not None:  # some layers would see no more of a longer sequence than its last chunk
        context = min(context, chunk)
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


_LENGTH, _HEAD = 9, 4
"""Tokens of the sequence that the probe looks at, and of its beginning, which reaches the rest through keys and values
alone: the engine computes a sequence over several steps."""
_NEIGHBOUR = 7
"""Most tokens of a sequence beside it."""
_LARGEST_DIFFERENCE, _LARGEST_OF_HALVES = 1e-3, 5e-2
"""Of a token's results beside others and alone, relative to their norm: far above what another order of sums makes of
float32, and of operations that a device has for 16 bits alone. Finds what counts positions itself; tokens that meet
outside attention are found by structure."""
_SCORE_OPTIONS = ("position_bias", "score_mod", "block_mask", "head_mask", "alibi")
"""Arguments that change scores, and that the paged cache does not have."""


@dataclass
class Probe:
    """Answers attention calls of one sequence, or of packed ones, densely, and notes what each call asks for."""

    max_model_len: int
    lengths: Sequence[int]
    """Tokens of each packed sequence."""
    known: Sequence[AttentionSpec] = ()
    """Of an earlier run: where there are some, windows come from them."""
    cached: Sequence[tuple[Tensor, Tensor]] = ()
    """Keys and values of each call of an earlier run, whose first _HEAD the sequence at index 1 reads in place of its
    own."""
    specs: list[AttentionSpec] = field(default_factory=list)
    """Of each call, in the order of calls."""
    stored: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values of each call."""
    masks: MaskRecorder = field(init=False)
    mixing: TokenMixing | None = None
    """What watches the run; None: a run in the model's dtype."""

    def __post_init__(self) -> None:
        self.masks = MaskRecorder(self.max_model_len)

    def attend(self, call: AttentionCall) -> Tensor:
        """As `Answerer`."""
        with nullcontext() if self.mixing is None else self.mixing.paused():
            spec = self._spec(call)
            self.specs.append(spec)
            self.stored.append((call.key, call.value))
            parts = [list(torch.split(x, list(self.lengths))) for x in (call.query, call.key, call.value)]
            if self.cached:
                for own, earlier in zip(parts[1:], self.cached[len(self.specs) - 1], strict=True):
                    own[1] = torch.cat((earlier[:_HEAD].to(own[1]), own[1][_HEAD:]))
            return torch.cat([dense_attention(spec, *sequence) for sequence in zip(*parts, strict=True)])

    def make_mask(self, function: MaskFunction, tokens: int) -> Tensor:
        """As `MaskMaker`."""
        with nullcontext() if self.mixing is None else self.mixing.paused():
            return self.masks.make(function, tokens)

    def _spec(self, call: AttentionCall) -> AttentionSpec:
        query, key, value, options = call.query, call.key, call.value, call.options
        tokens = sum(self.lengths)
        if len(query) != tokens or len(key) != tokens:
            raise UnsupportedModel(f"attention: given {len(key)} keys for {tokens} tokens, expected one for each")
        is_causal = options.get("is_causal") is not False and getattr(call.module, "is_causal", True) is not False
        if call.mask is None and not is_causal:
            raise UnsupportedModel("attention: given one that is not causal, expected causal attention")
        for name in _SCORE_OPTIONS:
            if options.get(name) is not None:
                raise UnsupportedModel(f"attention: given {name}, expected scores of query and key alone")
        if self.known:
            window = self.known[len(self.specs) % len(self.known)].window
        else:
            window = self.masks.window(call.mask, options.get("sliding_window"), _configured_window(call.module))
        scale, sinks = options.get("scaling"), options.get("s_aux")
        return AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=max(query.shape[2], value.shape[2]),
            scale=query.shape[2] ** -0.5 if scale is None else float(scale),
            window=window,
            soft_cap=options.get("softcap"),
            sinks=None if sinks is None else sinks.detach().float().flatten(),
        )


def probe(model: nn.Module, max_model_len: int, vocab_size: int) -> list[AttentionSpec]:
    """Find out how each layer attends, and that tokens meet in attention alone.

    Args:
        model: a causal LM of `transformers`, loaded, with linears of its own.
        max_model_len: longest sequence, in tokens.

    Raises:
        UnsupportedModel: the model can't run on the paged cache.
    """
    count = count_of_tokens(model)
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, vocab_size, (length,), generator=draw) for length in _lengths(count)]
    second = sequences[1]
    alone = Probe(max_model_len, [_LENGTH])
    expected = _run(model, alone, [second], PROBED_ATTENTION, num_tokens=0)
    if not alone.specs:
        raise UnsupportedModel("attention: given a model that does not call the attention interface, expected calls")
    has_halves = alone.mixing is not None and alone.mixing.kept_halves
    largest = _LARGEST_OF_HALVES if has_halves else _LARGEST_DIFFERENCE
    # Neighbours that are all alike crowd what has a capacity.
    same = [second if index == 1 else torch.full_like(each, 1) for index, each in enumerate(sequences)]
    _compare(_beside(model, alone, same, count), expected, largest)
    poisoned = torch.ones(count, dtype=torch.bool)
    poisoned[len(sequences[0]) + _HEAD : len(sequences[0]) + _LENGTH] = False
    _compare(_beside(model, alone, sequences, count, poisoned), expected[_HEAD:], largest)
    return alone.specs


def check_runs(model: nn.Module, specs: Sequence[AttentionSpec], max_model_len: int, vocab_size: int) -> None:
    """Run a model once, in its own dtype, as steps will.

    Args:
        model: a causal LM of `transformers`, with the engine's linears.
        specs: what `probe` has found.

    Raises:
        UnsupportedModel: the modelling code does not run, or calls attention another number of times.
    """
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, vocab_size, (length,), generator=draw) for length in (_NEIGHBOUR, _LENGTH)]
    run = Probe(max_model_len, [_NEIGHBOUR, _LENGTH], known=specs)
    _run(model, run, sequences, ATTENTION)
    _check_calls(run, len(specs))


def _lengths(count: int) -> list[int]:
    """Return the lengths of packed sequences, so many tokens in all; the second is the one that is looked at."""
    lengths = [_NEIGHBOUR, _LENGTH]
    while sum(lengths) < count:
        lengths.append(min(_NEIGHBOUR, count - sum(lengths)))
    return lengths


def _beside(
    model: nn.Module, alone: Probe, sequences: list[Tensor], count: int, poisoned: Tensor | None = None
) -> Tensor:
    """Run the second sequence beside others. Return its tokens' results, or those of tokens that aren't poisoned."""
    cached = alone.stored if poisoned is not None else ()
    beside = Probe(alone.max_model_len, [len(each) for each in sequences], known=alone.specs, cached=cached)
    results = _run(model, beside, sequences, ATTENTION, num_tokens=count, poisoned=poisoned)
    _check_calls(beside, len(alone.specs))
    of_second = slice(len(sequences[0]), len(sequences[0]) + _LENGTH)
    if poisoned is None:
        return results[of_second]
    if not bool(results[poisoned].isnan().all()):
        raise UnsupportedModel(
            "layers: given some that hide NaN, by whose way tokens that meet outside attention are found, expected "
            "arithmetic that passes it on"
        )
    return results[of_second][_HEAD:]


def _check_calls(run: Probe, count: int) -> None:
    if len(run.specs) != count:
        raise UnsupportedModel("attention: given another number of calls in each run, expected one number")


def _compare(results: Tensor, expected: Tensor, largest: float) -> None:
    if bool(results.isnan().any()) and not bool(expected.isnan().any()):
        raise UnsupportedModel(
            "layers: given some in which tokens meet outside attention, such as a convolution or a recurrent state, "
            "expected attention alone"
        )
    difference = float(((results - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    if not difference <= largest:
        raise UnsupportedModel(
            "layers: given some that mix tokens outside attention, such as a convolution or a recurrent state, or a "
            f"model that counts positions itself, expected attention alone (results differ by {difference:.2g})"
        )


def _configured_window(module: nn.Module) -> int | None:
    """Window by which `transformers`' own cache would drop keys of every layer."""
    config = getattr(module, "config", None)
    if getattr(config, "layer_types", None) is not None:
        return None
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) else None


def dense_attention(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend within one sequence that starts here; shapes as in an `AttentionCall`."""
    group = spec.num_heads // spec.num_kv_heads
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * spec.scale
    if spec.soft_cap is not None:
        scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
    places = torch.arange(len(query), device=query.device)
    hidden = places[None] > places[:, None]
    if spec.window is not None:
        hidden |= places[None] <= places[:, None] - spec.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks[:, None, None].expand(-1, len(query), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(query)]
    return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype).flatten(1)


def _run(
    model: nn.Module,
    probe: Probe,
    sequences: list[Tensor],
    implementation: str,
    *,
    num_tokens: int | None = None,
    poisoned: Tensor | None = None,
) -> Tensor:
    """(tokens, vocab_size) float32: logits of packed sequences. With `num_tokens`, as `TokenMixing` runs them."""
    device = next(model.parameters()).device
    token_ids, positions = torch.cat(sequences).to(device), positions_of(sequences).to(device)
    if num_tokens is not None:
        where = None if poisoned is None else poisoned.to(device)
        probe.mixing = TokenMixing(num_tokens, token_ids, where)
    set_implementation(model, implementation)
    set_answerer(model, probe.attend)
    token = mask_maker.set(probe.make_mask)
    try:
        with nullcontext() if probe.mixing is None else probe.mixing:
            logits = call_packed(model, token_ids, positions)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"modelling code: given an error on packed tokens without a cache, expected logits: {_one_line(error)}"
        ) from error
    finally:
        mask_maker.reset(token)
    return logits.float()


def positions_of(sequences: list[Tensor]) -> Tensor:
    """(tokens,) int64: place of each packed token in its sequence."""
    return torch.cat([torch.arange(len(sequence)) for sequence in sequences])


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"
