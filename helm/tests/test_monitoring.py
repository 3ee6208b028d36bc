"""Alert rules, dashboard and scaling queries: every metric and label is one of docs/metrics.md, every expression is one of
Prometheus's language, every alert is tested by promtool and explained in docs/operations.md.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import yaml

import chart

ALERTS = yaml.safe_load((chart.CHART / "files/alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((chart.CHART / "files/dashboard.json").read_text())
# What Prometheus and Kubernetes add.
ADDED_LABELS = {"namespace", "release", "instance", "le", "__name__"}


def documented():
    """Metrics of docs/metrics.md: name → (type, labels)."""
    page = (chart.REPOSITORY / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def dashboard_queries():
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]


def promtool(*arguments, cwd):
    prometheus = pathlib.Path(os.environ["LOCKSTEP_TEST_PROMETHEUS"])
    return subprocess.run([prometheus.with_name("promtool"), *arguments], cwd=cwd, capture_output=True, text=True)


class Monitoring(unittest.TestCase):
    def check_metrics(self, where, text):
        """Names and labels of what looks like a metric in an expression."""
        metrics = documented()
        for name, labels in re.findall(r"\b(lockstep_(?:coordinator|worker|trace)_\w+)(?:\{([^}]*)\})?", text):
            base = name if name in metrics else re.sub(r"_(bucket|sum|count)$", "", name)
            self.assertIn(base, metrics, f"{where}: not in docs/metrics.md")
            kind, known = metrics[base]
            self.assertEqual(base != name, kind == "histogram", f"{where}: {name} of a {kind}")
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels))
            self.assertLessEqual(used, known | ADDED_LABELS, f"{where}: {name}")

    def test_metrics_are_documented(self):
        for rule in ALERTS:
            self.check_metrics(rule["alert"], rule["expr"])
        for title, query, _ in dashboard_queries():
            self.check_metrics(title, query)
        for variable in DASHBOARD["templating"]["list"]:
            self.check_metrics(variable["name"], variable.get("definition", ""))
        for name in chart.EXAMPLES:
            for scaled in chart.of_kind(chart.render(chart.values_of(name))[0], "ScaledObject"):
                self.check_metrics(name, scaled["spec"]["triggers"][0]["metadata"]["query"])

    def test_legends_name_labels_that_are_kept(self):
        for title, query, legend in dashboard_queries():
            for label in re.findall(r"{{(\w+)}}", legend):
                kept = re.findall(r"by \(([^)]*)\)", query)
                if kept and "ignoring" not in query:
                    self.assertIn(label, [part.strip() for part in kept[-1].split(",")], title)

    def test_dashboard_has_no_holes(self):
        panels = DASHBOARD["panels"]
        self.assertEqual(len({panel["id"] for panel in panels}), len(panels))
        taken = set()
        for panel in panels:
            grid = panel["gridPos"]
            cells = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
            self.assertFalse(cells & taken, panel["title"])
            self.assertLessEqual(grid["x"] + grid["w"], 24)
            taken |= cells
        self.assertIn("Where did this token's time go", [panel["title"] for panel in panels])

    def test_queries_are_prometheus_s(self):
        values = {"$__rate_interval": "5m", "$namespace": ".*", "$release": ".*", "$model": ".*"}
        rules = []
        for index, (_, query, _) in enumerate(dashboard_queries()):
            for variable, value in values.items():
                query = query.replace(variable, value)
            rules.append({"record": f"panel_{index}", "expr": query})
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rules.yaml"
            path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
            for rules_file in (path, chart.CHART / "files/alerts.yaml"):
                checked = promtool("check", "rules", str(rules_file), cwd=folder)
                self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_alerts_fire_when_they_should(self):
        folder = chart.CHART / "tests"
        tested = yaml.safe_load((folder / "alerts_test.yaml").read_text())["tests"]
        names = {test["alertname"] for case in tested for test in case.get("alert_rule_test", []) if test["exp_alerts"]}
        self.assertEqual(names, {rule["alert"] for rule in ALERTS})
        ran = promtool("test", "rules", "alerts_test.yaml", cwd=folder)
        self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)

    def test_alerts_of_a_release_are_its_own(self):
        """Every selector of the chart's rules names namespace and release, and another release changes nothing."""
        values = chart.merged(chart.LEAST, {"monitoring": {"rules": {"enabled": True}}})
        spec = chart.render(values)[0]["PrometheusRule", "lockstep"]["spec"]
        for rule in spec["groups"][0]["rules"]:
            named = len(re.findall(r"\blockstep_(?:coordinator|worker|trace)_\w+(?=\{)|__name__=~", rule["expr"]))
            own = rule["expr"].count('{namespace="serving",release="lockstep"')
            self.assertEqual(own, named, rule["alert"])
            self.assertEqual(own, rule["expr"].count("{"), rule["alert"])
            self.assertGreater(own, 0, rule["alert"])
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "rendered.yaml").write_text(yaml.safe_dump(spec))
            shutil.copy(chart.CHART / "tests/alerts_release_test.yaml", folder)
            ran = promtool("test", "rules", "alerts_release_test.yaml", cwd=folder)
            self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)

    def test_the_dashboard_tells_releases_apart(self):
        for title, query, _ in dashboard_queries():
            self.assertEqual(query.count('release=~"$release"'), query.count("{"), title)

    def test_series_carry_the_release(self):
        """Alerts and scaling ask for a label that the ServiceMonitors add."""
        manifests, _ = chart.render(chart.merged(chart.values_of("mixed-pools"), {"monitoring": {"serviceMonitor": {"enabled": True}}}))
        for monitor in chart.of_kind(manifests, "ServiceMonitor"):
            for endpoint in monitor["spec"]["endpoints"]:
                self.assertEqual(endpoint["relabelings"], [{"targetLabel": "release", "replacement": "lockstep"}])
        for scaled in chart.of_kind(manifests, "ScaledObject"):
            query = scaled["spec"]["triggers"][0]["metadata"]["query"]
            self.assertRegex(query, r'^sum\(lockstep_\w+\{namespace="serving",release="lockstep"\}\)$')

    def test_alerts_are_explained(self):
        page = (chart.REPOSITORY / "docs/operations.md").read_text()
        explained = re.findall(r"^### (Lockstep\w+)$", page, re.MULTILINE)
        self.assertEqual(explained, [rule["alert"] for rule in ALERTS])
        for part in page.split("\n### Lockstep")[1:]:
            for word in ("**Means**", "**Look**", "**Do**"):
                self.assertIn(word, part.split("\n## ")[0], part.split("\n")[0])


if __name__ == "__main__":
    unittest.main()
