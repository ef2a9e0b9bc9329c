"""Draws pictures of a terminal as an SVG that shows them one after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from xml.sax.saxutils import escape

_CHARACTER, _LINE = 8.0, 18
_MARGIN, _BAR = 14, 34
_SHADES: Mapping[str, str] = {
    "default": "#d6dbe0",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
}
"""Of the colours by the names that pyte gives them; others are hexadecimal digits."""
_STYLE = (
    "text{font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d6dbe0;"
    "white-space:pre}.title{fill:#8b949e}.bold{font-weight:bold}"
)


@dataclass(frozen=True)
class Run:
    """Characters of one colour."""

    text: str
    colour: str
    """A name, or six hexadecimal digits."""
    is_bold: bool = False

    def longer(self, text: str) -> Run:
        """Return the run with more text."""
        return replace(self, text=self.text + text)


@dataclass(frozen=True)
class Frame:
    """What a terminal showed."""

    seconds: float
    """For which it is shown."""
    lines: tuple[tuple[Run, ...], ...]
    """From the top; each without blanks at its end."""


def draw(frames: Sequence[Frame], columns: int, title: str) -> str:
    """Return an SVG of the frames, again and again; the last alone for readers who want no motion.

    Args:
        frames: in their order, each with its time.
        title: what is shown above it.
    """
    rows = max((place + 1 for frame in frames for place, line in enumerate(frame.lines) if line), default=1)
    width, height = 2 * _MARGIN + columns * _CHARACTER, _BAR + rows * _LINE + _MARGIN
    strip = "".join(_frame(frame.lines[:rows], place * height) for place, frame in enumerate(frames))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" '
        f'height="{height}" role="img" aria-label="{escape(title, {chr(34): "&quot;"})} in a terminal">'
        f"<style>{_STYLE}{_motion(frames, height)}</style>"
        f'<rect width="{width:g}" height="{height}" rx="8" fill="#15181b"/>'
        + "".join(f'<circle cx="{20 + 18 * n}" cy="17" r="5.5" fill="{c}"/>' for n, c in enumerate(_LIGHTS))
        + f'<text class="title" x="84" y="22">{escape(title)}</text>'
        f'<svg y="{_BAR}" width="{width:g}" height="{height - _BAR}"><g class="strip">{strip}</g></svg></svg>'
    )


_LIGHTS = ("#ff5f57", "#febc2e", "#28c840")


def _motion(frames: Sequence[Frame], height: int) -> str:
    """Return the rules that move the strip of frames by one at a time."""
    ends = list(accumulate(frame.seconds for frame in frames))
    starts = [0.0, *ends[:-1]]
    stops = "".join(
        f"{100 * start / ends[-1]:.2f}%{{transform:translateY({-place * height}px)}}"
        for place, start in enumerate(starts)
    )
    last = -(len(frames) - 1) * height
    return (
        f"@keyframes show{{{stops}}}.strip{{animation:show {ends[-1]:.2f}s step-end infinite}}"
        f"@media(prefers-reduced-motion:reduce){{.strip{{animation:none;transform:translateY({last}px)}}}}"
    )


def _frame(lines: Sequence[Sequence[Run]], top: int) -> str:
    drawn = []
    for row, line in enumerate(lines):
        spans, column = [], 0
        for run in line:
            if run.text.strip():
                spans.append(_span(run, column))
            column += len(run.text)
        if spans:
            drawn.append(f'<text y="{top + row * _LINE + 13}">{"".join(spans)}</text>')
    return "".join(drawn)


def _span(run: Run, column: int) -> str:
    """Return a run at its place: viewers have different fonts, so each is as wide as its characters are to be."""
    text = run.text.strip(" ")
    column += len(run.text) - len(run.text.lstrip(" "))
    shade = _SHADES.get(run.colour.removeprefix("bright"))
    if shade is None and re.fullmatch("[0-9a-f]{6}", run.colour):
        shade = f"#{run.colour}"
    fill = "" if shade in (None, _SHADES["default"]) else f' fill="{shade}"'
    bold = ' class="bold"' if run.is_bold else ""
    long = f' textLength="{len(text) * _CHARACTER:g}" lengthAdjust="spacingAndGlyphs"' if len(text) > 1 else ""
    return f'<tspan x="{_MARGIN + column * _CHARACTER:g}"{fill}{bold}{long}>{escape(text)}</tspan>'
