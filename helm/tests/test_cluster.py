"""What the chart describes comes up on this machine and answers: its command lines, settings, probes and `helm test`.

Needs the binary (LOCKSTEP_BIN), the small model (LOCKSTEP_TEST_MODEL), etcd and openssl; apart from test_chart.py because
its processes want the machine for themselves.
"""

import hashlib
import http.server
import os
import pathlib
import re
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request

import chart
from kubelet import PATIENCE, Node

MODEL = pathlib.Path(os.environ["LOCKSTEP_TEST_MODEL"])
# Small workers, several on a machine.
SMALL = {"worker": {"gpus": 0, "replicas": 2, "config": {"threads_per_device": 1, "memory": "1GiB"}}}


def authority(folder):
    """A new authority; returns what signs a certificate for the loopback net."""

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-days", "30", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")

    def sign(addresses, name="lockstep-member"):
        openssl("req", *key, "-subj", "/CN=member", "-keyout", "member.key", "-out", "member.csr")
        names = ",".join([f"DNS:{name}", *(f"IP:{address}" for address in addresses)])
        (folder / "extensions").write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        sign = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", "extensions"]
        openssl("x509", "-req", "-in", "member.csr", *sign, "-out", "member.pem")
        read = lambda name: (folder / name).read_text()
        return {"ca.crt": read("ca.pem"), "tls.crt": read("member.pem"), "tls.key": read("member.key")}

    return sign


def serve_model():
    """The model over HTTP, for the init containers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", str(MODEL.stat().st_size))
            self.end_headers()
            with open(MODEL, "rb") as file:
                while piece := file.read(1 << 20):
                    self.wfile.write(piece)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Cluster(unittest.TestCase):
    def check(self, node):
        """It is up: probes, ports, `helm test`; then a worker and a coordinator end as they should."""
        for pod in node.pods.values():
            self.assertTrue(pod.probe("livenessProbe"), pod.name)
            self.assertTrue(pod.probe("startupProbe"), pod.name)
            declared = {port["containerPort"] for port in pod.spec["containers"][0]["ports"]}
            self.assertEqual(pod.listening_ports(), declared, pod.name)
        status, output = node.run_test_pod()
        self.assertEqual(status, 0, output)
        self.assertIn("Paris", output)
        for component in ("worker", "coordinator"):
            pod = node.of(component)[-1]
            self.assertEqual(pod.terminate(), 0, pod.name)

    def test_one_coordinator_and_a_model_from_a_server(self):
        server = serve_model()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        url = f"http://127.0.0.1:{server.server_port}/model.gguf"
        source = {"uri": url, "sha256": hashlib.sha256(MODEL.read_bytes()).hexdigest()}
        manifests, _ = chart.render(chart.merged(chart.merged(chart.values_of("cpu"), SMALL), {"model": source}))
        with Node(manifests) as node:
            node.start()
            node.wait_ready()
            self.check(node)

    def test_coordinators_over_etcd_with_certificates_and_tenants(self):
        values = {
            "model": {"path": MODEL.name, "cache": {"type": "persistentVolumeClaim", "existingClaim": "models"}},
            "coordinator": {"replicas": 2, "config": {"policy": "tensor=2", "max_sequence_tokens": 2048}},
            "etcd": {"mode": "bundled", "tls": {"secretName": "etcd"}},
            "tls": {
                "cluster": {"mode": "secret", "secretName": "cluster"},
                "clients": {
                    "mode": "secret",
                    "secretName": "clients",
                    "clientCa": {"secretName": "clients", "key": "ca.crt"},
                    "checkSecretName": "clients",
                    "serverName": "llm.example.org",
                },
            },
            "tenants": {"secretName": "tenants", "testKey": {"secretName": "test-tenant"}},
        }
        manifests, _ = chart.render(chart.merged(values, SMALL))
        with Node(manifests) as node:
            # Connections within the loopback net come from its first address, which etcd's members look at.
            addresses = ["127.0.0.1", *(pod.address for pod in node.pods.values())]
            # That for clients is for the name under which they come, which is none of this cluster's.
            for name, known in {"cluster": (addresses,), "etcd": (addresses,), "clients": ([], "llm.example.org")}.items():
                with tempfile.TemporaryDirectory() as folder:
                    node.secrets[name] = authority(pathlib.Path(folder))(*known)
            made = subprocess.run([os.environ["LOCKSTEP_BIN"], "tenant", "new", "test"], capture_output=True, text=True, check=True)
            node.secrets["tenants"] = {"tenants.toml": made.stdout}
            node.secrets["test-tenant"] = {"api-key": re.search(r"lockstep-\S+", made.stdout + made.stderr)[0]}
            (node.shared("models") / MODEL.name).symlink_to(MODEL)
            node.start()
            node.wait_ready()
            self.check(node)

    def test_a_broken_upgrade_is_backed_out_of_and_mended(self):
        """Coordinators that never got ready are replaced by ones that do, though one of theirs still leads: at first, and
        when an upgrade has broken what served."""
        claim = {"cache": {"type": "persistentVolumeClaim", "existingClaim": "models"}}
        values = {
            "insecure": True,
            "model": {"uri": "", "path": MODEL.name, **claim},
            "coordinator": {"replicas": 2, "config": {"policy": "tensor=2", "max_sequence_tokens": 2048, "model_name": "smol"}},
            "etcd": {"mode": "bundled", "bundled": {"replicas": 1}},
        }
        good, _ = chart.render(chart.merged(values, SMALL))
        broken, _ = chart.render(chart.merged(chart.merged(values, SMALL), {"model": {"path": "missing.gguf"}}))
        owner = "lockstep-coordinator"
        with Node(broken) as node:
            (node.shared("models") / MODEL.name).symlink_to(MODEL)
            node.start()
            node.wait_ready(node.of("etcd") + node.of("worker"))
            self.wait_refused(node)
            # The Deployment's way: one may be missing, the other stays until this one is ready.
            node.manifests = good
            node.replace(owner, 1)
            node.wait_ready()
            node.manifests = broken
            node.replace(owner, 1, waits=False)
            self.wait_refused(node)
            node.manifests = good
            node.replace(owner, 1)
            node.wait_ready()
            status, output = node.run_test_pod()
            self.assertEqual(status, 0, output)

    def wait_refused(self, node):
        """Waits until the coordinators are alive, none is ready, and each says why: it has made its settings known."""
        end = time.monotonic() + PATIENCE
        while True:
            coordinators = node.of("coordinator")
            alive = all(pod.probe("livenessProbe") for pod in coordinators)
            if alive and all("cannot be loaded" in self.refusal(pod) for pod in coordinators):
                return
            self.assertLess(time.monotonic(), end)
            time.sleep(0.2)

    def refusal(self, pod):
        """Why a coordinator is not ready; nothing if it is, or does not answer."""
        try:
            urllib.request.urlopen(f"http://{pod.address}:7080/readyz", timeout=2).close()
        except urllib.error.HTTPError as error:
            return error.read().decode()
        except OSError:
            pass
        return ""


if __name__ == "__main__":
    unittest.main()
