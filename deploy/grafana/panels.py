"""The part of Grafana's dashboard model that the dashboards need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 39  # of Grafana 11; later versions migrate it when they load it
_WIDTH = 24  # columns of Grafana's grid
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the name of its lines."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A time series panel."""

    title: str
    about: str
    """Description: what it shows, and what to conclude from it."""
    queries: Sequence[Query]
    unit: str = "short"
    """Grafana's name of the unit: s, percentunit, bytes, short, ops."""
    width: int = 8
    top: float | None = None
    """Upper end of the axis, for a quantity with a maximum."""
    marks: Sequence[tuple[float, str]] = ()
    """Values to mark with a coloured line, such as an objective."""


@dataclass(frozen=True)
class Row:
    """Panels under one heading, side by side as far as they fit."""

    title: str
    panels: Sequence[Panel]
    height: int = 8


@dataclass(frozen=True)
class Choice:
    """A variable at the head of a dashboard: the values of a label."""

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Dashboard:
    """A dashboard."""

    uid: str
    title: str
    about: str
    choices: Sequence[Choice]
    rows: Sequence[Row]
    tags: Sequence[str] = field(default=("pagestream",))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that Grafana imports."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": list(self.tags),
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [_datasource_variable(), *(_variable(choice) for choice in self.choices)]},
            "panels": self._panels(),
        }

    def _panels(self) -> list[dict[str, Any]]:
        placed: list[dict[str, Any]] = []
        y = 0
        for row in self.rows:
            placed.append(_row(row.title, len(placed) + 1, y))
            y += 1
            x = 0
            for panel in row.panels:
                if x + panel.width > _WIDTH:
                    x, y = 0, y + row.height
                grid = {"x": x, "y": y, "w": panel.width, "h": row.height}
                placed.append(_panel(panel, len(placed) + 1, grid))
                x += panel.width
            y += row.height
        return placed


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
        "panels": [],
    }


def _panel(panel: Panel, number: int, grid: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": False},
    }
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.marks:
        steps = [{"color": "transparent", "value": None}, *({"color": c, "value": v} for v, c in panel.marks)]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["custom"]["thresholdsStyle"] = {"mode": "line"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.name,
        "label": choice.label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": choice.query, "refId": choice.name},
        "definition": choice.query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
