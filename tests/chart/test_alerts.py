"""Alert rules and dashboards, by Prometheus' own tools."""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagestream_gateway.error_codes import ERROR_CODES
from pagestream_operator import instruments
from pagestream_telemetry import ENGINE_METRICS, GATEWAY_METRICS, Kind, Metric, exposed_name
from support.kubernetes.api import CommandError, run_tool
from support.kubernetes.chart import CHART, ROOT

pytestmark = pytest.mark.kube

ALERTS = CHART / "files" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
OPERATIONS = ROOT / "docs" / "operations.md"
LABELS = {"k8s_namespace_name", "k8s_pod_name", "pagestream_pool", "service_name"}  # made of resource attributes
_SELECTOR = re.compile(r"([a-z_][a-z0-9_]*)(?:\{([^}]*)\})?")
_NAME = re.compile(r"\b(?:pagestream|gen_ai|redis)_[a-z0-9_]+")
EXPORTED_OF_REDIS = ("redis_up", "redis_aof_last_write_status")  # see test_redis_users.py
_ENDINGS = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}


def metrics() -> list[Metric]:
    own = [value for value in vars(instruments).values() if isinstance(value, Metric)]
    return [*ENGINE_METRICS, *GATEWAY_METRICS, *own]


def series() -> dict[str, set[str]]:
    """Every series that a process exposes, with its labels."""
    of_redis = dict.fromkeys(EXPORTED_OF_REDIS, LABELS)
    return of_redis | {
        exposed_name(metric) + ending: {name.replace(".", "_") for name in metric.attributes} | LABELS
        for metric in metrics()
        for ending in _ENDINGS[metric.kind]
    }


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def panels() -> dict[str, str]:
    """Expressions of all dashboards, by what shows them."""
    return {
        f"{path.stem}/{panel['title']}/{target['refId']}": target["expr"]
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    }


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """The series that an expression names, each with the labels that it asks for."""
    found = []
    for name, labels in _SELECTOR.findall(expression):
        if _NAME.fullmatch(name) and name not in all_labels():
            found.append((name, set(re.findall(r"([a-z_0-9]+)\s*(?:=~|!~|!=|=)", labels))))
    return found


def all_labels() -> set[str]:
    return {label for labels in series().values() for label in labels}


def test_the_rules_are_right_and_fire_when_they_must(tmp_path: Path) -> None:
    shutil.copy(ALERTS, tmp_path / "alerts.yaml")
    shutil.copy(CASES, tmp_path)
    assert "SUCCESS" in run_tool("promtool", "test", "rules", str(tmp_path / CASES.name))


@pytest.mark.parametrize(("old", "new"), [("> 60", "> 600"), ("== 0", "== 7"), ("> 0.05", "> 0.5"), ("> 0.95", "> 1")])
def test_the_cases_notice_a_rule_that_is_wrong(old: str, new: str, tmp_path: Path) -> None:
    text = ALERTS.read_text()
    assert old in text
    (tmp_path / "alerts.yaml").write_text(text.replace(old, new))
    shutil.copy(CASES, tmp_path)
    with pytest.raises(CommandError, match="FAILED"):
        run_tool("promtool", "test", "rules", str(tmp_path / CASES.name))


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == set(alerts())
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == set(alerts())


@pytest.mark.parametrize("alert", alerts())
def test_every_alert_says_how_bad_it_is_and_what_to_do(alert: str) -> None:
    rule = alerts()[alert]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert f"### {alert}\n" in OPERATIONS.read_text()


def test_errors_are_those_that_callers_can_not_help() -> None:
    """What a gateway answers with 5xx counts, but for gateways that stop; what it answers with 4xx does not, but for
    lost data."""
    left_out = re.findall(r'error_type!~"([^"]+)"', alerts()["PagestreamErrors"]["expr"])
    assert left_out
    for status, _, _, code, _ in ERROR_CODES.values():
        counts = re.fullmatch("|".join(left_out), code) is None
        assert counts == ((status >= 500 or code == "digest_mismatch") and code != "gateway_stopping"), code


def test_every_expression_of_the_dashboards_is_promql(tmp_path: Path) -> None:
    rules = []
    for number, expression in enumerate(panels().values()):
        filled = expression.replace("$__rate_interval", "1m")
        rules.append({"record": f"panel:{number}", "expr": re.sub(r"\$[a-z]+", ".*", filled)})
    file = tmp_path / "panels.yaml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run_tool("promtool", "check", "rules", str(file))


@pytest.mark.parametrize("where", [*alerts(), *panels()])
def test_every_series_and_label_is_one_that_a_process_exposes(where: str) -> None:
    expression = alerts()[where]["expr"] if where in alerts() else panels()[where]
    known = series()
    named = selectors(expression)
    assert named
    for name, labels in named:
        assert name in known
        assert labels <= known[name]


def test_what_an_alert_looks_at_is_drawn() -> None:
    def names(expressions: Iterable[str]) -> set[str]:
        return {name for expression in expressions for name, _ in selectors(expression)}

    asked = names(rule["expr"] for rule in alerts().values()) - set(EXPORTED_OF_REDIS)
    assert asked - names(panels().values()) == set()
    drawn = "".join(panels().values())
    assert all(code in drawn for code in ("storage_full", "logs_full", "no_engine"))
