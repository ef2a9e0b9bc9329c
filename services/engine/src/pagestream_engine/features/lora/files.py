"""An adapter's folder in PEFT's format: checked when it is loaded, its matrices read when a step first wants them.

`adapter_config.json` says which modules have matrices, of which rank and scale, and what of it is not supported. Its
regular expressions come from outside: they are matched without backtracking, in time linear in a module's name. Each
module is some rows of a linear of the model (`ModuleSlice`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import torch
from torch import Tensor

from pagestream_engine.errors import (
    AdapterChanged,
    AdapterFileError,
    AdapterMismatch,
    ModelError,
    UnsupportedAdapter,
)
from pagestream_engine.models.nested import text_name
from pagestream_engine.models.safetensors_file import Entry, open_files, read_header
from pagestream_engine.models.weights import LinearWeight, WeightMap
from pagestream_engine.request import Adapter

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModuleMatrices:
    """B A of one module, as tensors or where they lie in the file."""

    a: Entry
    """(rank, in features)"""
    b: Entry
    """(out features, rank)"""
    scale: float

    @property
    def rank(self) -> int:
        """Of the product."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The matrices of one module: its output gets (x a^T) b * scale."""

    a: Tensor
    """(rank, in features), contiguous."""
    b: Tensor
    """(rank, out features), contiguous: transposed, so that a rank's outputs lie side by side."""
    scale: float


def open_adapter(name: str, folder: Path, modules: Mapping[str, ModuleSlice], max_rank: int) -> Adapter:
    """Check an adapter's files against a model without reading its matrices into memory.

    Args:
        name: that requests give.
        max_rank: the largest that is allowed.

    Raises:
        AdapterFileError: a file is missing, cut off or malformed.
        AdapterMismatch: it was trained for another model.
        UnsupportedAdapter: it has something that is not supported, or too large a rank.
    """
    _check(folder, read_settings(folder), modules, max_rank)
    return Adapter(name, str(folder), _revision(folder))


def read_adapter(
    adapter: Adapter, modules: Mapping[str, ModuleSlice], dtype: torch.dtype, max_rank: int
) -> Mapping[str, ModuleWeights]:
    """Check an adapter's files against a model, and read its matrices into the CPU's memory, by module.

    Args:
        adapter: with the revision that is expected.
        max_rank: the largest that is allowed.

    Raises:
        AdapterChanged: the files are others than those of the revision.
        AdapterError: as `open_adapter`.
    """
    folder = Path(adapter.folder)
    matrices = _check(folder, read_settings(folder), modules, max_rank)
    weights: dict[str, ModuleWeights] = {}
    try:
        with open_files() as files:
            for module, each in matrices.items():
                place = modules[module]
                if not place.rows:
                    continue
                a, b = torch.empty(each.a.shape, dtype=dtype), torch.empty(each.b.shape, dtype=dtype)
                files.read(each.a, a)
                files.read(each.b, b)
                a, b = place.cut_a(a), place.cut_b(b)
                weights[module] = ModuleWeights(a, b.T.contiguous(), each.scale)
    except (OSError, ModelError) as error:
        raise AdapterFileError(f"{folder}: unreadable: {error}") from error
    found = _revision(folder)
    if found != adapter.revision:
        raise AdapterChanged(adapter.name, adapter.revision, found)
    return weights


def _check(
    folder: Path, settings: AdapterSettings, modules: Mapping[str, ModuleSlice], max_rank: int
) -> Mapping[str, ModuleMatrices]:
    """Return where the matrices of each module lie."""
    path = folder / WEIGHTS_FILE
    if not path.is_file() and (folder / "adapter_model.bin").is_file():
        raise UnsupportedAdapter(f"{folder}: given adapter_model.bin, expected {WEIGHTS_FILE}; save it as safetensors")
    try:
        entries = read_header(path)
    except ModelError as error:
        raise AdapterFileError(f"{path}: {error}") from error
    pairs: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if found is None:
            raise UnsupportedAdapter(
                f"{path}: {name}: given a tensor that is neither lora_A nor lora_B of a linear, expected no other"
            )
        pairs.setdefault(found["module"], {})[found["matrix"]] = entry
    if not pairs:
        raise AdapterFileError(f"{path}: given no tensors, expected lora_A and lora_B of at least one module")
    matrices: dict[str, ModuleMatrices] = {}
    for module, pair in sorted(pairs.items()):
        own = module if module in modules else text_name(module) or module
        if own in matrices:
            raise AdapterFileError(f"{path}: {module}: given matrices for {own} twice, expected them once")
        if own not in modules:
            names = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
            raise AdapterMismatch(
                f"{path}: {module}: given matrices for a module that this model does not have, or that takes no "
                f"adapters; expected layers of this model, and in them {names}"
            )
        matrices[own] = _matrices(path, module, pair, settings, modules[own])
    rank = max(each.rank for each in matrices.values())
    if rank > max_rank:
        raise UnsupportedAdapter(f"{folder}: given rank {rank}, expected at most max_lora_rank, {max_rank}; raise it")
    return matrices


def _matrices(
    path: Path, module: str, pair: Mapping[str, Entry], settings: AdapterSettings, place: ModuleSlice
) -> ModuleMatrices:
    rank = settings.rank_of(module)
    rows, columns = place.shape
    expected = {"A": (rank, columns), "B": (rows, rank)}
    for matrix, shape in expected.items():
        entry = pair.get(matrix)
        if entry is None:
            raise AdapterFileError(f"{path}: {module}: given no lora_{matrix}, expected one of shape {shape}")
        if not entry.dtype.is_floating_point:
            raise UnsupportedAdapter(
                f"{path}: {module}: given lora_{matrix} of {entry.dtype}, expected floating point; save it dequantised"
            )
        if entry.shape != shape:
            raise AdapterMismatch(
                f"{path}: {module}: given lora_{matrix} of shape {entry.shape}, expected {shape} by this model and "
                f"by {CONFIG_FILE}"
            )
    return ModuleMatrices(pair["A"], pair["B"], settings.scale_of(module))


def _revision(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = folder / name
        try:
            digest.update(f"{name}:{path.stat().st_size}:".encode())
            with path.open("rb") as file:
                while part := file.read(_READ_BYTES):
                    digest.update(part)
        except OSError as error:
            raise AdapterFileError(f"{path}: unreadable: {error}") from error
    return digest.hexdigest()[:32]


CONFIG_FILE = "adapter_config.json"
_IGNORED = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "target_modules",  # the tensors say it
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "lora_dropout",  # of training
        "megatron_core",
        "qalora_group_size",  # means something with use_qalora
        "ensure_weight_tying",  # of modules_to_save
        "runtime_config",
    }
)
_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
)
_MOST = 2.0**32
"""Ranks and alphas are less: beyond it some have no value as a float."""
_MOST_PATTERNS = 4096
_ORDINARY_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` after which the base model's weights are what they were."""


@dataclass(frozen=True)
class AdapterSettings:
    """What the configuration says of each module's matrices."""

    rank: int
    alpha: float
    divides_by_root: bool
    """Whether the scale is alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023, arXiv:2312.03732), not alpha / rank."""
    rank_pattern: Mapping[NamePattern, int]
    alpha_pattern: Mapping[NamePattern, float]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return int(_value_of(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return what a module's product is multiplied with."""
        alpha, rank = _value_of(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.divides_by_root else rank)


def read_settings(folder: Path) -> AdapterSettings:
    """Read `adapter_config.json`.

    Raises:
        AdapterFileError: it is missing or malformed.
        UnsupportedAdapter: it asks for something that is not supported, which the message names.
    """
    path = folder / CONFIG_FILE
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise AdapterFileError(f"{path}: no such file, expected an adapter in PEFT's format") from error
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterFileError(f"{path}: unreadable, expected a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterFileError(f"{path}: given a {type(fields).__name__}, expected a JSON object")
    _refuse_unsupported(path, fields)
    rank, alpha = fields.get("r", 0), fields.get("lora_alpha", 0)
    if not _is_whole(rank) or not _is_number(alpha):
        raise AdapterFileError(f"{path}: given r {rank!r} and lora_alpha {alpha!r}, expected two positive numbers")
    ranks = _pattern(path, fields, "rank_pattern", _is_whole, MAX_STEPS_OF_ADAPTER)
    room = MAX_STEPS_OF_ADAPTER - sum(pattern.num_steps for pattern in ranks)
    return AdapterSettings(
        rank=rank,
        alpha=float(alpha),
        divides_by_root=bool(fields.get("use_rslora", False)),
        rank_pattern=ranks,
        alpha_pattern=_pattern(path, fields, "alpha_pattern", _is_number, room),
    )


def _refuse_unsupported(path: Path, fields: Mapping[str, Any]) -> None:
    """Refuse all but plain LoRA, by the names of the fields, and what is set and not known here."""
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedAdapter(f"{path}: peft_type: given {kind!r}, expected LORA")
    if fields.get("bias", "none") != "none":
        raise UnsupportedAdapter(f"{path}: bias: given {fields['bias']!r}, expected none; train without biases")
    start = fields.get("init_lora_weights", True)
    if start not in _ORDINARY_STARTS:
        raise UnsupportedAdapter(
            f"{path}: init_lora_weights: given {start!r}, which changes the base model's weights; expected one of "
            f"{', '.join(map(str, _ORDINARY_STARTS))}; let PEFT convert it "
            "(path_initial_model_for_weight_conversion)"
        )
    for name in sorted(fields.keys() - _READ - _IGNORED):
        if fields[name]:
            raise UnsupportedAdapter(f"{path}: {name}: given {fields[name]!r:.80}, expected it not to be set")


def _pattern(path: Path, fields: Mapping[str, Any], name: str, is_valid: Any, room: int) -> Mapping[NamePattern, Any]:
    given = fields.get(name) or {}
    if not isinstance(given, dict) or not all(map(is_valid, given.values())):
        raise AdapterFileError(f"{path}: {name}: given {given!r:.80}, expected modules and a positive number for each")
    if len(given) > _MOST_PATTERNS:
        raise AdapterFileError(f"{path}: {name}: given {len(given)} patterns, expected at most {_MOST_PATTERNS}")
    patterns: dict[NamePattern, Any] = {}
    for pattern, value in given.items():
        try:
            found = NamePattern(pattern, room)
        except ValueError as error:
            raise AdapterFileError(
                f"{path}: {name}: given {pattern!r:.80}, expected a pattern of at most {MAX_CHARACTERS} characters: "
                f"{error}"
            ) from error
        room -= found.num_steps
        patterns[found] = value
    return patterns


def _value_of(patterns: Mapping[NamePattern, float], module: str, default: float) -> float:
    """Return the value of the first pattern that a module's name ends with, as PEFT finds it."""
    return next((value for pattern, value in patterns.items() if pattern.matches(module)), default)


def _is_whole(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 0 < given < _MOST


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < _MOST


MAX_CHARACTERS = 1024
_MAX_STEPS = 4096
"""Of a pattern, with counted repeats written out: most states of its automaton."""
MAX_STEPS_OF_ADAPTER = 65_536
"""Of all patterns of an adapter that are more than a name: at most 15 MB were measured."""
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    codes.CATEGORY_DIGIT: str.isdecimal,
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    codes.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    codes.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    codes.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
}
_AT_BEGINNING = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
_AT_END = (codes.AT_END, codes.AT_END_STRING)
_END = 0
"""The state after the whole pattern."""


@dataclass(slots=True)
class _State:
    """Goes on to all of `after`: with `accepts` by one character, else at once, where `is_met` holds of the place."""

    after: list[int]
    accepts: Callable[[str], bool] | None = None
    is_met: Callable[[int, int], bool] | None = None
    """Gets the place and the text's length."""


class NamePattern:
    """A pattern that the end of a module's name matches, from a dot or the beginning on, as PEFT finds it.

    Python's own matcher tries one way after another, and their number grows with the power of the repeats: a pattern of
    20 characters can hold the interpreter for hours. Here all ways are followed together.

    Args:
        room: steps that the patterns before it have left of MAX_STEPS_OF_ADAPTER.

    Raises:
        ValueError: it is malformed, too long, has more steps than there are left, or has something that only a matcher
            that backtracks knows: references, conditions, looking ahead or back, flags, possessive repeats, word
            boundaries.
    """

    def __init__(self, text: str, room: int = MAX_STEPS_OF_ADAPTER) -> None:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters")
        self._states: list[_State] = [_State([])]
        self.num_steps = 0
        """What the pattern takes of MAX_STEPS_OF_ADAPTER."""
        self._room = room
        self._accepting: dict[tuple[Any, int], Callable[[str], bool]] = {}
        """By the tree's items: a set of characters may be long, and is repeated."""
        self._plain: re.Pattern[str] | None = None
        """Where there is one way alone, after each dot: most patterns are names."""
        try:
            tree = parser.parse(rf"(?:.*\.)?(?:{text})")
            own = [code for code, _ in parser.parse(text)]
            if all(code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN) for code in own):
                self._plain = re.compile(rf"(?:.*\.)?(?:{text})")
            else:
                self._start = self._sequence(tree, _END)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error
        self._accepting.clear()  # the tree goes, and its ids with it

    def matches(self, name: str) -> bool:
        """Whether a module's name ends with the pattern."""
        if self._plain is not None:
            return self._plain.fullmatch(name) is not None
        current = self._reached([self._start], 0, len(name))
        for place, character in enumerate(name, 1):
            after: list[int] = []
            for number in current:
                state = self._states[number]
                if state.accepts is not None and state.accepts(character):
                    after += state.after
            current = self._reached(after, place, len(name))
            if not current:
                return False
        return _END in current

    def _reached(self, numbers: Iterable[int], place: int, length: int) -> set[int]:
        """Return the states that are reached from some without another character."""
        reached: set[int] = set()
        waiting = list(numbers)
        while waiting:
            number = waiting.pop()
            if number in reached:
                continue
            reached.add(number)
            state = self._states[number]
            if state.accepts is None and (state.is_met is None or state.is_met(place, length)):
                waiting += state.after
        return reached

    def _count_step(self) -> None:
        self.num_steps += 1
        if self.num_steps > _MAX_STEPS:
            raise ValueError("its repeats are too many")
        if self.num_steps > self._room:
            raise ValueError(f"it and those before it have more than {MAX_STEPS_OF_ADAPTER} parts")

    def _new(self, state: _State) -> int:
        self._states.append(state)
        return len(self._states) - 1

    def _sequence(self, tree: Any, after: int) -> int:
        """Return the state before a sequence, of the one after it."""
        for code, argument in reversed(list(tree)):
            after = self._item(code, argument, after)
        return after

    def _item(self, code: Any, argument: Any, after: int) -> int:
        self._count_step()
        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            key = (code, id(argument))
            if key not in self._accepting:
                self._accepting[key] = _accepts(code, argument)
            return self._new(_State([after], accepts=self._accepting[key]))
        if code is codes.BRANCH:
            return self._new(_State([self._sequence(branch, after) for branch in argument[1]]))
        if code is codes.SUBPATTERN and not argument[1] and not argument[2]:
            return self._sequence(argument[3], after)
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, tree = argument
            return self._repeat(least, most, tree, after)
        if code is codes.AT and argument in _AT_BEGINNING:
            return self._new(_State([after], is_met=lambda place, _: place == 0))
        if code is codes.AT and argument in _AT_END:
            return self._new(_State([after], is_met=lambda place, length: place == length))
        raise ValueError(f"{str(argument if code is codes.AT else code).lower()} is not supported")

    def _repeat(self, least: int, most: Any, tree: Any, after: int) -> int:
        if least > _MAX_STEPS or (most is not codes.MAXREPEAT and most > _MAX_STEPS):
            raise ValueError("its repeats are too many")
        if most is codes.MAXREPEAT:
            loop = self._new(_State([after]))
            self._states[loop].after.append(self._sequence(tree, loop))
            first = loop
        else:
            first = after
            for _ in range(most - least):
                first = self._new(_State([after, self._sequence(tree, first)]))
                self._count_step()
        for _ in range(least):
            first = self._sequence(tree, first)
            self._count_step()
        return first


def _accepts(code: Any, argument: Any) -> Callable[[str], bool]:
    """Return whether an item of one character is one."""
    if code is codes.ANY:
        return lambda character: character != "\n"
    if code is codes.LITERAL:
        return lambda character: ord(character) == argument
    if code is codes.NOT_LITERAL:
        return lambda character: ord(character) != argument
    if code is codes.RANGE:
        return lambda character: argument[0] <= ord(character) <= argument[1]
    if code is codes.CATEGORY:
        return _CATEGORIES[argument]
    parts = [_accepts(each, given) for each, given in argument if each is not codes.NEGATE]
    is_negated = argument[0][0] is codes.NEGATE
    return lambda character: any(part(character) for part in parts) is not is_negated


_EXCLUDED = frozenset({"head", "router", "experts"})
"""Linears without adapters, by a word of the parameter's name: a token's experts get rows of their own choice, and the
head computes rows that were picked from the step's."""


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """What a rank has of a module that is divided, or is on another rank."""

    rows: tuple[tuple[int, int], ...]
    """First and end of ranges of the module's rows, in order."""
    first_column: int
    shape: tuple[int, int]
    """Of the whole module: output and input features."""


@dataclass(frozen=True, slots=True)
class ModuleSlice:
    """A module of the checkpoint: rows of a linear, which may hold several (query, key and value; gate and up)."""

    parameter: str
    """The linear's name among the model's parameters."""
    part: int
    """The module's place among those of the linear."""
    first_row: int
    """Of the linear's output features."""
    rows: int
    """Output features; 0 for a module of another stage."""
    in_features: int
    cut: ModuleCut | None = None
    """None for a whole module."""

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features of the whole module."""
        return (self.rows, self.in_features) if self.cut is None else self.cut.shape

    def cut_a(self, a: Tensor) -> Tensor:
        """(rank, in features of the whole module) -> (rank, in features), contiguous."""
        if self.cut is None:
            return a
        return a[:, self.cut.first_column : self.cut.first_column + self.in_features].contiguous()

    def cut_b(self, b: Tensor) -> Tensor:
        """(out features of the whole module, rank) -> (rows, rank)."""
        return b if self.cut is None else torch.cat([b[first:end] for first, end in self.cut.rows])


def adaptable_modules(weights: WeightMap, of_rank: WeightMap | None = None) -> Mapping[str, ModuleSlice]:
    """Return the modules of a model that adapters may change, by their names in the checkpoint.

    Args:
        of_rank: what a rank has of them; None: all.
    """
    modules: dict[str, ModuleSlice] = {}
    for parameter, weight in weights.items():
        if not isinstance(weight, LinearWeight) or _EXCLUDED & set(parameter.split(".")):
            continue
        own = weight if of_rank is None else of_rank.get(parameter)
        first = 0
        for place, name in enumerate(dict.fromkeys(part.name for part in weight.parts)):
            rows = [part.rows for part in weight.parts if part.name == name]
            module = ModuleSlice(parameter, place, first, sum(rows), weight.in_features)
            if own is not weight or len(rows) > 1:  # several parts of a module: its rows in another order
                module = _cut(module, name, own if isinstance(own, LinearWeight) else None)
            modules[name] = module
            first += module.rows
    return modules


def _cut(module: ModuleSlice, name: str, own: LinearWeight | None) -> ModuleSlice:
    """Return what a rank's linear has of a module; None: nothing."""
    if own is None:
        return replace(module, rows=0, cut=ModuleCut((), 0, module.shape))
    parts = [part for part in own.parts if part.name == name]
    rows = tuple((part.first_row, part.first_row + part.rows) for part in parts)
    cut = ModuleCut(rows, own.first_column, module.shape)
    return replace(module, rows=sum(part.rows for part in parts), in_features=own.in_features, cut=cut)
