"""Flags of options, for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from pagestream_options.declaration import Option


def add_flags(
    group: argparse._ActionsContainer,
    options: Iterable[Option],
    *,
    is_passed_on: bool = False,
    is_checked: bool = False,
) -> None:
    """Add the flag of each option that has one; its default is None, or what the parser's `argument_default` is.

    Args:
        group: a parser, or a group of one.
        options: in the order of the help.
        is_passed_on: whether another process reads the values: they stay texts then, which that process checks.
        is_checked: whether the parser checks ranges, where nothing later does.
    """
    for each in options:
        if each.help:
            facts = _passed_on(each) if is_passed_on else _facts(each, is_checked=is_checked)
            if each.spelled:
                facts["dest"] = each.name
            group.add_argument(each.flag, help=each.help.replace("%", "%%"), **facts)


def _passed_on(each: Option) -> dict[str, Any]:
    if each.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"metavar": each.metavar or (f"{{{','.join(each.choices)}}}" if each.choices else None)}


def _facts(each: Option, *, is_checked: bool) -> dict[str, Any]:
    if each.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if each.choices is not None and each.kind is str:
        return {"choices": each.choices, "metavar": each.metavar}
    convert = split_names if each.kind == Sequence[str] else each.kind
    if not is_checked:
        return {"metavar": each.metavar, "type": convert}

    def read(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not each.accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} was given, {each.wanted} is expected")
        return value

    return {"metavar": each.metavar, "type": read}


def given_flags(arguments: argparse.Namespace, options: Iterable[str]) -> dict[str, Any]:
    """Return the options that a command line has, by their names."""
    values = vars(arguments)
    return {name: values[name] for name in options if values.get(name) is not None}


def split_names(text: str) -> tuple[str, ...]:
    """Return the names of a list like "name,other"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
