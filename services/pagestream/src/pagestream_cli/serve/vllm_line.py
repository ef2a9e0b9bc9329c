"""Read command lines that were written for `vllm serve`."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pagestream_options.engine import ENGINE_OPTIONS

from pagestream_cli.console import say
from pagestream_cli.errors import UsageError
from pagestream_cli.serve.model import REPOSITORY
from pagestream_cli.serve.vllm_flags import FLAGS, SHORT_NAMES, Arity, Flag, Idle, Refused, Taken, spoken

CONFIG, MODEL, HELP = "--config", "--model", "--help"
_MAY_SWALLOW = ("--served-model-name", "--api-key")
PAGE = "docs/coming-from.md"
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_HUMAN = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kKmMgGtT])")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COUNTS = ("--max-model-len", "--max-num-batched-tokens")
"""Flags whose numbers may have a unit."""
_DTYPES = {"half": "float16", "float": "float32"}
_NOTHING = ("", "none", "null", "{}", "[]")
"""Values that ask for nothing, in lower case."""
_NGRAM = ("[ngram]", "ngram")
"""What `--speculative-model` was called before vLLM had methods."""
_STRUCTURED, _BACKEND, _REASONING = "--structured-outputs-config", "backend", "reasoning_parser"


class _Given(NamedTuple):
    """A flag of a command line."""

    name: str
    """Its long name."""
    is_on: bool
    """False: a switch that was turned off, as by `--no-X`."""
    value: str | None
    """What stood behind `=`."""


def translate(arguments: Sequence[str], options: Mapping[str, argparse.Action]) -> list[str]:
    """Return a command line of vLLM's, or of ours, as `pagestream serve` takes it.

    Flags of vLLM's are spelled as they are here, or left out, with one line of warning, where they change nothing.

    Args:
        arguments: what stands behind `serve`.
        options: of the parser of `serve`, by their names.

    Raises:
        UsageError: a flag is unknown, has no value, or asks for what isn't here; or a file of flags can't be read.
    """
    return _Translation(options).run(arguments)


class _Translation:
    """One command line on its way."""

    def __init__(self, options: Mapping[str, argparse.Action]) -> None:
        self._options = options
        self._taken: list[str] = []
        self._models: list[str] = []
        self._several: dict[str, list[str]] = {}
        """Flags of several values that were given, with these; the last of equal ones counts."""
        self._idle: dict[str, str] = {}

    def run(self, arguments: Sequence[str]) -> list[str]:
        typed, files = _without_config(arguments)
        configured = [each for file in files for each in _flags_of(file)]
        self._walk(deque(_with_nested(configured)))
        model_of_file, self._models = self._models, []
        self._walk(deque(_with_nested(typed)))
        models = list(dict.fromkeys(self._models or model_of_file))
        if len(models) > 1:
            raise UsageError(f"two models were given: {models[0]} and {models[1]}")
        if self._idle:
            reasons = dict.fromkeys(self._idle.values())
            flags = {why: ", ".join(name for name, each in self._idle.items() if each == why) for why in reasons}
            shown = "; ".join(f"{names} ({why})" for why, names in flags.items())
            say(f"warning: flags of vLLM's that change nothing here: {shown}. {PAGE} has all")
        several = [word for flag, values in self._several.items() for word in (flag, *values)]
        return [*models, *self._taken, *several]

    def _walk(self, rest: deque[str]) -> None:
        while rest:
            word = rest.popleft()
            if word == "--":
                self._models += rest
                break
            given = self._flag(word)
            if given is None:
                self._models.append(word)
            elif given.name == MODEL:
                self._models += _values(given, Arity.ONE, rest)
            elif given.name in FLAGS:
                self._known(given, FLAGS[given.name], rest)
            else:
                self._own(word, given, rest)
        if not self._models:
            self._models += self._swallowed()

    def _swallowed(self) -> list[str]:
        """Take the model back from a flag of several values before it, as in `--served-model-name NAME MODEL`."""
        for flag in _MAY_SWALLOW:
            values = self._several.get(flag, [])
            if len(values) > 1 and _is_model(values[-1]):
                return [values.pop()]
        return []

    def _flag(self, word: str) -> _Given | None:
        """Return the flag that a word is; None where it is a value."""
        if not word.startswith("-") or word == "-" or _NUMBER.fullmatch(word):
            return None
        spelled, equals, text = word.partition("=")
        value = text if equals else None
        if spelled.startswith("-O") and spelled != "-O":  # -O3
            return _Given(SHORT_NAMES["-O"], True, spelled[2:])
        name = spelled.replace("_", "-") if spelled.startswith("--") else SHORT_NAMES.get(spelled, spelled)
        for known, is_on in ((name, True), *_opposites(name)):
            if known in FLAGS and (is_on or FLAGS[known].arity is Arity.SWITCH):
                return _Given(known, is_on, value)
            if known in self._options and (is_on or self._options[known].nargs == 0):
                return _Given(known, is_on, None if known == HELP else value)  # vLLM has --help=all
        if not name.startswith("--"):
            return _Given(name, True, value)  # the parser says what is wrong with it
        option = ENGINE_OPTIONS.get(name.removeprefix("--").replace("-", "_"))
        if option is not None:
            raise UsageError(f"{spelled} is no option of serve: {option.elsewhere}")
        every = [each for each in (*self._options, *FLAGS) if each.startswith("--")]
        close = difflib.get_close_matches(name, every, n=1, cutoff=0.75)
        close += [each for each in every if each.startswith(name)] if not close else []
        raise UsageError(
            f"{spelled}: there is no such option{f'; did you mean {close[0]}?' if close else ''}",
            hint="`pagestream serve --help` lists all",
        )

    def _own(self, word: str, given: _Given, rest: deque[str]) -> None:
        """Take an option that is not vLLM's, as it was typed, with its values; none where a file turns it off."""
        if not given.is_on:
            return
        equals = "" if given.value is None else f"={given.value}"
        self._taken.append(f"{given.name}{equals}" if given.name.startswith("--") else word)
        action = self._options.get(given.name)
        if action is not None and given.value is None and rest and action.nargs is None:
            self._taken.append(rest.popleft())

    def _known(self, given: _Given, flag: Flag, rest: deque[str]) -> None:
        values = _values(given, flag.arity, rest)
        is_on = given.is_on
        if flag.arity is Arity.SWITCH and values:
            is_on, values = is_on == (values[0].lower() == "true"), []
        match flag:
            case Taken():
                self._take(given.name, flag, values, is_on=is_on)
            case Refused():
                if is_on and not _is_nothing(given.name, values):
                    why = spoken(flag.why)
                    raise UsageError(f"vLLM's {given.name} isn't here: {why}", hint=f"{PAGE} has all its flags")
            case Idle() if given.name == _STRUCTURED:
                self._structured(flag, values[0])
            case Idle():
                self._check_idle(given.name, flag, values)

    def _take(self, name: str, flag: Taken, values: list[str], *, is_on: bool) -> None:
        if flag.arity is Arity.SWITCH:
            self._taken.append(flag.to if is_on else f"--no-{flag.to.removeprefix('--')}")
            return
        if flag.arity is Arity.ONE:
            value = values[0]
            if value == "None" or (name == "--max-model-len" and value.lower() in ("auto", "-1")):
                return
            if name == "--speculative-model" and value in _NGRAM:
                self._taken += ["--speculative-method", "ngram"]
                return
            if name == "--attention-backend" and value.isupper():  # such as FLASH_ATTN
                self._idle[f"{name} {value}"] = "kernels are chosen by device"
                return
            values = [_value(name, value)]
        if flag.arity is Arity.MANY:
            self._several[flag.to] = values
            return
        self._taken.append(flag.to)
        self._taken += values

    def _check_idle(self, name: str, flag: Idle, values: list[str]) -> None:
        if flag.values is not None and not _is_nothing(name, values):
            wrong = [each for each in values if each not in flag.values]
            if wrong:
                expected = " or ".join(each for each in flag.values)
                raise UsageError(
                    f"vLLM's {name} {wrong[0]} isn't here: {flag.why}", hint=f"{expected} is taken, and changes nothing"
                )
        self._idle[name] = spoken(flag.why)

    def _structured(self, flag: Idle, text: str) -> None:
        """Read the settings of structured outputs: the choice of a backend changes nothing, other members do."""
        config = _json_object(_STRUCTURED, text)
        if parser := config.pop(_REASONING, None):
            self._taken += ["--reasoning-parser", str(parser)]
        config.pop(_BACKEND, None)
        asked = [name for name, value in config.items() if value]
        if asked:
            raise UsageError(f"vLLM's {_STRUCTURED} with {asked[0]} isn't here: {flag.why}")
        self._idle[_STRUCTURED] = flag.why


def _flags_of(file: str) -> Iterator[str]:
    """Yield the flags of a YAML file. The command line, which is read later, wins over them."""
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{CONFIG} {file} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{CONFIG} {file}: a mapping of flags to values is expected")
    for key, value in content.items():
        name = f"--{str(key).removeprefix('--').replace('_', '-')}"
        if isinstance(value, bool):
            yield name if value else f"--no-{name.removeprefix('--')}"
        elif isinstance(value, dict):
            yield f"{name}={json.dumps(value)}"
        elif isinstance(value, list):
            yield from (name, *(json.dumps(each) if isinstance(each, dict) else str(each) for each in value))
        elif value is not None:
            yield f"{name}={value}"


def _without_config(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return a command line without `--config FILE`, and the files."""
    kept: list[str] = []
    files: list[str] = []
    rest = deque(arguments)
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        if name != CONFIG:
            kept.append(word)
        elif equals or rest:
            files.append(value if equals else rest.popleft())
        else:
            raise UsageError(f"{CONFIG} needs a file")
    return kept, files


def _with_nested(arguments: Iterable[str]) -> list[str]:
    """Replace members of JSON values, such as `--speculative-config.method ngram`, by whole values."""
    kept: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    rest = deque(arguments)
    while rest:
        word = rest.popleft()
        path, equals, text = word.partition("=")
        flag, dot, members = path.partition(".")
        name = SHORT_NAMES.get(flag, flag.replace("_", "-"))
        if not dot or name not in FLAGS:
            kept.append(word)
            continue
        if not equals and not rest:
            raise UsageError(f"{path} needs a value")
        value = _json_value(text if equals else rest.popleft())
        *parents, last = members.removesuffix("+").split(".")
        place = nested.setdefault(name, {})
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = str(value).split(",") if members.endswith("+") else value
    return [*kept, *(f"{name}={json.dumps(value)}" for name, value in nested.items())]


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return _count(text) if _HUMAN.fullmatch(text) else text


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{name}: {text!r} was given, a JSON object is expected") from error
    if not isinstance(found, dict):
        raise UsageError(f"{name}: {text!r} was given, a JSON object is expected")
    return found


def _opposites(name: str) -> Iterator[tuple[str, bool]]:
    """Yield the flags that a name may turn off."""
    if name.startswith("--no-"):
        yield f"--{name.removeprefix('--no-')}", False
    if name.startswith("--disable-"):
        yield f"--enable-{name.removeprefix('--disable-')}", False
    if name.startswith("--enable-"):
        yield f"--disable-{name.removeprefix('--enable-')}", False


def _values(given: _Given, arity: Arity, rest: deque[str]) -> list[str]:
    """Take a flag's values from its word, then from those that follow."""
    values = [] if given.value is None else [given.value]
    match arity:
        case Arity.SWITCH:
            if not values and rest and rest[0].lower() in ("true", "false"):
                values.append(rest.popleft())
        case Arity.ONE | Arity.OPTIONAL:
            if not values and rest and not _is_flag(rest[0]):
                values.append(rest.popleft())
        case Arity.MANY:
            while rest and not _is_flag(rest[0]):
                values.append(rest.popleft())
    if not values and arity in (Arity.ONE, Arity.MANY):
        raise UsageError(f"{given.name} needs a value")
    return values


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word)


def _is_model(word: str) -> bool:
    return REPOSITORY.fullmatch(word) is not None or Path(word).is_dir()


def _is_nothing(name: str, values: list[str]) -> bool:
    """Whether values ask for nothing: they are empty, or one part of what could be divided."""
    is_size = name.endswith("-parallel-size")
    return bool(values) and all(each.lower() in _NOTHING or (is_size and each == "1") for each in values)


def _value(name: str, text: str) -> str:
    if name in _COUNTS and _HUMAN.fullmatch(text):
        return str(_count(text))
    return _DTYPES.get(text, text) if name == "--dtype" else text


def _count(text: str) -> int:
    """Return the number that a text such as `8k` (8,000) or `8K` (8,192) stands for."""
    found = _HUMAN.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return int(float(found["number"]) * _UNITS[found["unit"]])
