"""The Grafana dashboard and the alert rules of docs/guides/monitoring: every metric and label that they name is served,
and the programs that read these files accept them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.server.metrics import REFUSALS
from tests.server.clients.pypi import interpreter
from tests.server.running import Running

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docs" / "guides" / "monitoring"
METRIC = re.compile(r"\b(?:vllm|stoker):\w+")
LABEL = re.compile(r"[{,(]\s*(\w+)\s*(?:=~?|!=|!~|,|\))")
PROMETHEUS_ADDS = {"job", "instance"}
# The models of Grafana 10.1, whose dashboards later versions read.
READ_DASHBOARD = """
import json, sys
from grafana_foundation_sdk.models.dashboard import Dashboard
found = Dashboard.from_json(json.load(open(sys.argv[1])))
assert found.panels and all(panel.targets for panel in found.panels)
print(len(found.panels), [variable.name for variable in found.templating.list_val])
"""
READ_EXPRESSIONS = "import json, sys, promql_parser\nfor line in json.load(sys.stdin): promql_parser.parse(line)"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return found


def panels() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in dashboard()["panels"] for target in panel["targets"]]


def alerts() -> list[tuple[str, str]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def served(server: Running) -> dict[str, set[str]]:
    """Labels of every metric that has been served, by name, after requests that drafted and one that was refused."""
    server.chat("Read this receipt as JSON: 2 x Tea 4.20 EUR.", max_tokens=48, temperature=0)
    found: dict[str, set[str]] = {}
    for line in server.get("/metrics").text.splitlines():
        if match := re.match(r"# TYPE (\S+) (\w+)", line):
            names = [match[1]] if match[2] != "histogram" else [f"{match[1]}_{part}" for part in ("bucket", "count")]
            found.update({name: set() for name in names})
        elif match := re.match(r"([\w:]+)\{(.*)\} \S+$", line):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2]))
    return found


def test_every_metric_and_label_of_panels_and_alerts_is_served(server: Running) -> None:
    found = served(server)
    assert found["vllm:prompt_tokens_total"] == {"engine", "model_name"}
    for where, expression in panels() + alerts():
        names = METRIC.findall(expression)
        assert names or expression.startswith("up{"), where
        missing = [name for name in names if name not in found]
        assert not missing, f"{where}: {missing} is not served"
        known = PROMETHEUS_ADDS.union(*(found[name] for name in names))
        unknown = [label for label in LABEL.findall(expression) if label not in known]
        assert not unknown, f"{where}: no such label: {unknown}"


def test_every_reason_that_an_alert_asks_for_is_one_that_the_server_gives() -> None:
    source = (ROOT / "src" / "stoker" / "server" / "lifecycle" / "service.py").read_text(encoding="utf-8")
    given = set(re.findall(r'metrics\.refused\("(\w+)"\)', source))
    assert given == set(REFUSALS)
    asked = {reason for _, expression in alerts() for reason in re.findall(r'reason="(\w+)"', expression)}
    assert asked
    assert asked <= given


def test_grafanas_own_models_read_the_dashboard_and_its_panels_do_not_overlap() -> None:
    python = interpreter("grafana-foundation-sdk==1769699998!10.1.0")
    ran = subprocess.run(
        [python, "-c", READ_DASHBOARD, MONITORING / "dashboard.json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == f"{len(dashboard()['panels'])} ['datasource', 'model']"
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_expression_is_promql() -> None:
    python = interpreter("promql-parser==0.11.0")
    texts = [text.replace("$__rate_interval", "1m").replace("$model", ".*") for _, text in panels() + alerts()]
    ran = subprocess.run(
        [python, "-c", READ_EXPRESSIONS],
        input=json.dumps(texts), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, which comes with Prometheus, is not installed here")
    for arguments in (
        ["check", "config", str(MONITORING / "prometheus.yml")],
        ["test", "rules", str(ROOT / "tests" / "guides" / "alerts_test.yml")],
    ):
        ran = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
