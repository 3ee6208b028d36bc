"""Container files, the compose file and the systemd units: linted, held against each other, and run as far as a machine
without a container engine can: compose's command lines as processes, the settings file by the binary.

    LOCKSTEP_BIN=target/release/lockstep LOCKSTEP_TEST_MODEL=… LOCKSTEP_TEST_PROMETHEUS=… python -m unittest test_containers
"""

import contextlib
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

import yaml

DEPLOY = pathlib.Path(__file__).parents[1]
REPOSITORY = DEPLOY.parent
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
MODEL = pathlib.Path(os.environ["LOCKSTEP_TEST_MODEL"])
BINARY = os.environ["LOCKSTEP_BIN"]
# Longest wait for anything.
PATIENCE = 60


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


class Images(unittest.TestCase):
    def test_hadolint_finds_nothing(self):
        hadolint = pathlib.Path(sys.executable).with_name("hadolint")
        for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
            linted = run(hadolint, DEPLOY / name)
            self.assertEqual(linted.returncode, 0, linted.stdout + linted.stderr)

    def test_images_differ_where_they_must(self):
        """One binary, no root, no toolkit; both build in the same way."""
        texts = {kind: (DEPLOY / f"Dockerfile.{kind}").read_text() for kind in ("cpu", "cuda")}
        for text in texts.values():
            last = text.split("\nFROM ")[-1]
            self.assertTrue(last.startswith("gcr.io/distroless/cc-debian12:nonroot"))
            self.assertIn("\nUSER 65532:65532\n", last)
            self.assertIn('ENTRYPOINT ["lockstep"]', last)
            self.assertNotIn("nvidia/cuda", text)
        build = [text.split("\nFROM ")[1].split("\n\n")[0].replace("lockstep-cli/cuda,", "") for text in texts.values()]
        self.assertEqual(*build)
        toolchain = re.search(r'rust-version = "([\d.]+)"', (REPOSITORY / "Cargo.toml").read_text())[1]
        image = re.search(r"FROM rust:([\d.]+)-", texts["cpu"])[1]
        number = lambda version: tuple(int(part) for part in version.split("."))
        self.assertGreaterEqual(number(image), number(toolchain))


class Compose(unittest.TestCase):
    def test_files_and_services_are_there(self):
        services = COMPOSE["services"]
        for name, service in services.items():
            self.assertTrue("image" in service, name)
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                if source.startswith("."):
                    self.assertTrue((DEPLOY / "compose" / source).resolve().exists(), volume)
                elif not source.startswith("$"):
                    self.assertIn(source, COMPOSE["volumes"])
            for other, how in service.get("depends_on", {}).items():
                self.assertIn(other, services)
                if how["condition"] == "service_healthy":
                    self.assertIn("healthcheck", services[other])
            for port in service.get("ports", []):
                self.assertTrue(port.startswith("127.0.0.1:"), f"{name} is open to other machines")
            if name.startswith(("coordinator", "worker")):
                self.assertTrue(service["read_only"] and service["cap_drop"] == ["ALL"], name)
                self.assertGreaterEqual(int(service["stop_grace_period"].rstrip("s")), 45)

    def test_prometheus_takes_its_settings(self):
        with tempfile.TemporaryDirectory() as folder:
            for source in (DEPLOY / "compose/prometheus.yaml", REPOSITORY / "helm/files/alerts.yaml"):
                shutil.copy(source, folder)
            promtool = pathlib.Path(os.environ["LOCKSTEP_TEST_PROMETHEUS"]).with_name("promtool")
            checked = run(promtool, "check", "config", pathlib.Path(folder) / "prometheus.yaml")
            self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_grafana_finds_source_and_dashboard(self):
        source = yaml.safe_load((DEPLOY / "compose/grafana.yaml").read_text())["datasources"][0]
        self.assertEqual(source["url"], "http://prometheus:9090")
        folder = yaml.safe_load((DEPLOY / "compose/dashboards.yaml").read_text())["providers"][0]["options"]["path"]
        mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
        self.assertIn(f"{folder}/lockstep.json", mounted)

    def test_the_cluster_answers(self):
        """etcd, coordinator and workers with the file's own command lines and variables, each under an address of its own."""
        net = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        names = ("etcd", "coordinator", "worker-a", "worker-b")
        addresses = {name: f"{net}.{index + 1}" for index, name in enumerate(names)}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            place = {"${MODELS:?a folder of models}": str(MODEL.parent), "${MODEL:?a file in that folder}": MODEL.name}

            def localize(name, text):
                for variable, value in place.items():
                    text = text.replace(variable, value)
                text = re.sub(r"(?<=//)(etcd)(?=:)", addresses["etcd"], text).replace("0.0.0.0", addresses[name])
                return text.replace("=/models/", f"={MODEL.parent}/").replace("=/data", f"={folder}/data")

            for name in names:
                service = COMPOSE["services"][name]
                command = [localize(name, part) for part in service["command"]]
                variables = {key: localize(name, str(value)) for key, value in service.get("environment", {}).items()}
                # Nobody collects traces here.
                variables.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
                if variables.get("LOCKSTEP_ADVERTISE_HOST"):
                    variables["LOCKSTEP_ADVERTISE_HOST"] = addresses[variables["LOCKSTEP_ADVERTISE_HOST"]]
                    variables["LOCKSTEP_THREADS_PER_DEVICE"] = "1"
                command = command if name == "etcd" else [BINARY, *command]
                log = stack.enter_context(open(f"{folder}/{name}.log", "w"))
                process = subprocess.Popen(command, env={"PATH": os.environ["PATH"], **variables}, stdout=log, stderr=log)
                stack.callback(process.wait)
                stack.callback(process.kill)
            end = time.monotonic() + PATIENCE
            while True:
                try:
                    urllib.request.urlopen(f"http://{addresses['coordinator']}:7080/readyz", timeout=2).close()
                    break
                except OSError as error:
                    logs = [pathlib.Path(f"{folder}/{name}.log").read_text()[-2000:] for name in names]
                    self.assertLess(time.monotonic(), end, f"{error}: {logs}")
                    time.sleep(0.1)
            server = f"--server={addresses['coordinator']}:7070"
            said = run(BINARY, "generate", server, "--temperature=0", "--max-tokens=8", "The capital of France is", timeout=PATIENCE)
            self.assertEqual(said.returncode, 0, said.stderr)
            self.assertIn("Paris", said.stdout)


class Units(unittest.TestCase):
    def install(self, root, *roles):
        installed = run(DEPLOY / "systemd/install.sh", BINARY, *roles, env={**os.environ, "DESTDIR": str(root)})
        self.assertEqual(installed.returncode, 0, installed.stderr)

    def test_units_are_systemd_s(self):
        with tempfile.TemporaryDirectory() as root:
            self.install(root, "coordinator", "worker")
            units = sorted(pathlib.Path(root).glob("etc/systemd/system/*.service"))
            self.assertEqual([unit.name for unit in units], ["lockstep-coordinator.service", "lockstep-worker.service"])
            # The command is checked to be there: take it for the installed one.
            for unit in units:
                unit.write_text(unit.read_text().replace("/usr/local/bin/", f"{root}/usr/local/bin/"))
            checked = run("systemd-analyze", "verify", "--man=no", *units)
            self.assertEqual((checked.returncode, checked.stderr), (0, ""))

    def test_a_drain_ends_before_it_is_cut_off(self):
        for role in ("coordinator", "worker"):
            shown = run(BINARY, role, "--help").stdout
            drain = int(re.search(r"--drain-timeout-secs.*?\[default: (\d+)\]", shown, re.DOTALL)[1])
            unit = (DEPLOY / f"systemd/lockstep-{role}.service").read_text()
            self.assertGreaterEqual(int(re.search(r"TimeoutStopSec=(\d+)", unit)[1]), drain + 30)

    def test_settings_are_the_binary_s(self):
        """The binary gets past the file, to a setting that is wrong."""
        with tempfile.TemporaryDirectory() as root:
            self.install(root, "coordinator", "worker")
            settings = pathlib.Path(root) / "etc/lockstep/lockstep.toml"
            # What is commented out must be known, too.
            uncommented = re.sub(r'(?m)^# (?=\w+ = )', "", settings.read_text())
            for text in (settings.read_text(), uncommented):
                settings.write_text(text)
                for role, wrong in (("coordinator", "--policy=none"), ("worker", "--device=none")):
                    refused = run(BINARY, role, "--config", settings, wrong, timeout=PATIENCE)
                    self.assertNotIn("settings file", refused.stderr)
                    self.assertIn("none", refused.stderr)
                    self.assertNotEqual(refused.returncode, 0)

    def test_what_is_there_is_kept(self):
        with tempfile.TemporaryDirectory() as root:
            self.install(root, "worker")
            settings = pathlib.Path(root) / "etc/lockstep/lockstep.toml"
            settings.write_text("# mine\n")
            self.install(root, "worker")
            self.assertEqual(settings.read_text(), "# mine\n")
            self.assertFalse((pathlib.Path(root) / "etc/systemd/system/lockstep-coordinator.service").exists())
            self.assertNotEqual(run(DEPLOY / "systemd/install.sh", BINARY, "wroker", env={**os.environ, "DESTDIR": root}).returncode, 0)


if __name__ == "__main__":
    unittest.main()
