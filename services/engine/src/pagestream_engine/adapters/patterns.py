"""Regular expressions from an adapter's own file, matched without backtracking: in time linear in a module's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

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
