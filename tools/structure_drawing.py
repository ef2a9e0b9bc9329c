"""Draws the rooms of packages as an SVG: boxes by floor, the lowest floor below, and arrows to what a room imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from structure import Arrows, floors

_CHARACTER = 7.5
_BOX_HEIGHT = 28
_GAP = 36
_FLOOR_HEIGHT = 84
_TITLE_HEIGHT = 34
_MARGIN = 70
_BOW = 45
_STYLE = (
    "text{font:13px sans-serif;fill:#1c2733}.title{font-weight:bold;font-size:15px}"
    ".room{fill:#eaf1f8;stroke:#4a6a8a}.arrow{fill:none;stroke:#4a6a8a;stroke-opacity:.55}"
)
_MARKER = (
    '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#4a6a8a"/></marker>'
)


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    width: float

    @property
    def middle(self) -> float:
        return self.left + self.width / 2


def draw(packages: Mapping[str, Arrows]) -> str:
    """Return an SVG with the rooms of each package, one package below the other."""
    parts: list[str] = []
    top, width = 10.0, 0.0
    for name, rooms in packages.items():
        boxes, right, bottom = _place(rooms, top + _TITLE_HEIGHT)
        parts.append(f'<text class="title" x="{_MARGIN}" y="{top + 16:.0f}">{escape(name)}</text>')
        parts += _package(rooms, boxes)
        top, width = bottom + _MARGIN, max(width, right, _MARGIN + 10 * len(name))
    size = f'width="{width + _MARGIN:.0f}" height="{top:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style><defs>{_MARKER}</defs>'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _place(rooms: Arrows, top: float) -> tuple[dict[str, _Box], float, float]:
    """Return the boxes, and the right and lower ends of the drawing."""
    by_floor = floors(rooms)
    rows: list[Sequence[str]] = [
        sorted(room for room in rooms if by_floor[room] == floor)
        for floor in range(max(by_floor.values(), default=-1), -1, -1)
    ]
    widths = {room: _CHARACTER * len(room) + 20 for room in rooms}
    row_widths = [sum(widths[room] for room in row) + _GAP * (len(row) - 1) for row in rows]
    whole = max(row_widths, default=0.0)
    boxes: dict[str, _Box] = {}
    for number, (row, row_width) in enumerate(zip(rows, row_widths, strict=True)):
        left = _MARGIN + (whole - row_width) / 2
        for room in row:
            boxes[room] = _Box(left, top + number * _FLOOR_HEIGHT, widths[room])
            left += widths[room] + _GAP
    return boxes, _MARGIN + whole, top + len(rows) * _FLOOR_HEIGHT - (_FLOOR_HEIGHT - _BOX_HEIGHT)


def _package(rooms: Arrows, boxes: Mapping[str, _Box]) -> Iterator[str]:
    for room in sorted(rooms):
        for other in sorted(rooms[room]):
            yield _arrow(boxes[room], boxes[other])
    for room, box in sorted(boxes.items()):
        place = f'x="{box.left:.1f}" y="{box.top:.1f}" width="{box.width:.1f}" height="{_BOX_HEIGHT}"'
        yield f'<rect class="room" rx="4" {place}/>'
        yield f'<text text-anchor="middle" x="{box.middle:.1f}" y="{box.top + 18:.1f}">{escape(room)}</text>'


def _arrow(begin: _Box, end: _Box) -> str:
    """Draw a curve from one box's lower edge to the other's upper edge; in a circle, along the floor."""
    if begin.top == end.top:
        y = begin.top + _BOX_HEIGHT
        curve = f"M{begin.middle:.1f} {y:.1f}C{begin.middle:.1f} {y + 30:.1f} {end.middle:.1f} {y + 30:.1f}"
        return f'<path class="arrow" marker-end="url(#head)" d="{curve} {end.middle:.1f} {y:.1f}"/>'
    y, bend = begin.top + _BOX_HEIGHT, (end.top - begin.top - _BOX_HEIGHT) / 2
    # An arrow past other floors bows outwards, so that it is seen beside their boxes.
    passed = (end.top - begin.top) / _FLOOR_HEIGHT - 1
    bow = min(2.0, passed) * _BOW * (1 if end.middle >= begin.middle else -1)
    first, second = f"{begin.middle + bow:.1f} {y + bend:.1f}", f"{end.middle + bow:.1f} {end.top - bend:.1f}"
    curve = f"M{begin.middle:.1f} {y:.1f}C{first} {second}"
    return f'<path class="arrow" marker-end="url(#head)" d="{curve} {end.middle:.1f} {end.top:.1f}"/>'
