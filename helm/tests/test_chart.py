"""What the chart renders, held against Kubernetes' schemas, the binary's settings and house rules.

    LOCKSTEP_BIN=target/release/lockstep python -m unittest discover helm/tests     # UPDATE_GOLDEN=1 writes golden files
"""

import copy
import difflib
import json
import os
import pathlib
import re
import subprocess
import tarfile
import tempfile
import unittest

import helm_python as helm
import yaml

import apiserver
import chart

# What Chart.yaml asks for, and the newest that is known.
KUBERNETES_VERSIONS = ("1.30", "1.37")
# Settings of the binary that other values decide, and of the page that computes in browsers, which no image holds.
SHARED = "etcd etcd_prefix etcd_ca etcd_cert etcd_key etcd_username etcd_password_file etcd_insecure cluster_ca cluster_cert cluster_key insecure"
OWNED = {
    "coordinator": f"grpc_listen http_listen coordinator_id model tenants tls_cert tls_key client_ca browser_dir {SHARED}",
    "worker": f"worker_id coordinator advertise_host listen rank_listen http_listen kernel_cache {SHARED}",
}
PATH = {"uri": "", "path": "model.gguf"}
ACME = {"mode": "certManager", "issuerRef": {"name": "acme"}, "clusterNames": False, "dnsNames": ["llm.example.org"], "ca": {"from": "system"}}
ALL_TLS = {part: {"mode": "secret", "secretName": part} for part in ("cluster", "clients")}


RENDERED = {name: chart.render(chart.values_of(name)) for name in chart.EXAMPLES}


class Manifests(unittest.TestCase):
    def test_lint_finds_nothing(self):
        for name in chart.EXAMPLES:
            report = helm.lint(str(chart.CHART), chart.values_of(name), strict=True, kube_version="v1.31.0")
            self.assertEqual(report["errors"], [], name)
            self.assertEqual([message for message in report["messages"] if message["severity"] >= 2], [], name)

    def test_manifests_fit_the_schemas(self):
        for manifests, _ in RENDERED.values():
            for manifest in manifests.values():
                chart.check_any(manifest, KUBERNETES_VERSIONS)

    def test_a_misspelt_field_is_found(self):
        manifests = copy.deepcopy(RENDERED["minimal"][0])
        deployment = manifests["Deployment", "lockstep-coordinator"]
        deployment["spec"]["template"]["spec"]["contaners"] = []
        with self.assertRaises(AssertionError):
            chart.check_schema(deployment, KUBERNETES_VERSIONS[0])

    def test_golden_files(self):
        for name, (manifests, notes) in RENDERED.items():
            documents = [yaml.safe_dump(manifest, sort_keys=True, width=150) for manifest in manifests.values()]
            text = "---\n".join(documents) + "".join(f"# {line}".rstrip() + "\n" for line in notes.splitlines())
            # Files that are tested by themselves.
            text = re.sub(r"(?s)(\n  lockstep.json: ).*?(?=\nkind:)", r"\1…", text)
            path = chart.GOLDEN / f"{name}.yaml"
            if os.environ.get("UPDATE_GOLDEN"):
                path.write_text(text)
            before = path.read_text() if path.exists() else ""
            difference = difflib.unified_diff(before.splitlines(), text.splitlines(), str(path), "rendered", lineterm="")
            self.assertEqual("\n".join(difference), "", "UPDATE_GOLDEN=1 takes the change over")

    def test_a_package_has_what_is_needed(self):
        with tempfile.TemporaryDirectory() as folder:
            package = helm.package(str(chart.CHART), destination=folder)
            with tarfile.open(package) as archive:
                names = {name.removeprefix("lockstep/") for name in archive.getnames()}
        self.assertLessEqual({"files/alerts.yaml", "files/dashboard.json", "templates/tests/generate.yaml"}, names)
        self.assertEqual([name for name in names if name.startswith(("tests/", "examples/"))], [])

    def test_notes_name_three_commands(self):
        for _, notes in RENDERED.values():
            commands = [line for line in notes.splitlines() if line.startswith("  ")]
            self.assertEqual([line.split()[0] for line in commands], ["kubectl", "helm", "kubectl"])


class Policies(unittest.TestCase):
    def test_pods_are_confined(self):
        for name, (manifests, _) in RENDERED.items():
            for owner, pod in chart.pods(manifests):
                security = pod["securityContext"]
                self.assertTrue(security["runAsNonRoot"] and security["runAsUser"] > 0, owner)
                self.assertEqual(security["seccompProfile"], {"type": "RuntimeDefault"}, owner)
                self.assertFalse(pod["automountServiceAccountToken"], owner)
                self.assertFalse(pod["enableServiceLinks"], owner)
                self.assertFalse(pod.get("hostPID") or pod.get("hostNetwork"), owner)
                self.assertEqual(bool(pod.get("hostIPC")), name == "hybrid" and owner == "lockstep-worker", owner)
                for container in chart.containers(pod):
                    allowed = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
                    self.assertEqual(container["securityContext"], allowed, owner)
                    self.assertFalse([port for port in container.get("ports", []) if "hostPort" in port], owner)

    def test_resources_are_bounded(self):
        for manifests, _ in RENDERED.values():
            for owner, pod in chart.pods(manifests):
                for container in chart.containers(pod):
                    resources = container["resources"]
                    for kind in ("requests", "limits"):
                        self.assertLessEqual({"cpu", "memory"}, set(resources[kind]), owner)
                    devices = {key: value for key, value in resources["limits"].items() if "/" in key}
                    same = {key: value for key, value in resources["requests"].items() if "/" in key}
                    self.assertEqual(devices, same, owner)

    def test_probes_are_truthful(self):
        """Alive asks whether the process answers, ready whether it can work; neither waits for the other."""
        for name, (manifests, _) in RENDERED.items():
            for owner, pod in chart.pods(manifests):
                if pod.get("restartPolicy") == "Never":
                    continue
                for container in pod["containers"]:
                    ports = {port["name"] for port in container["ports"]}
                    alive, ready = container["livenessProbe"], container["readinessProbe"]
                    if "exec" in ready:
                        # Where a certificate is asked for, which nodes have not.
                        self.assertEqual((name, container["name"]), ("tls-existing-etcd", "coordinator"))
                        self.assertEqual(alive["exec"]["command"], container["startupProbe"]["exec"]["command"])
                        self.assertEqual([part for part in alive["exec"]["command"] if part != "--live"], ready["exec"]["command"])
                        continue
                    for probe in (alive, ready, container["startupProbe"]):
                        self.assertIn((probe.get("httpGet") or probe["tcpSocket"])["port"], ports, owner)
                    if container["name"] != "etcd":
                        self.assertEqual(alive["httpGet"]["path"], "/healthz", owner)
                        self.assertEqual(ready["httpGet"]["path"], "/readyz", owner)
                    self.assertGreaterEqual(alive["failureThreshold"] * alive["periodSeconds"], 60, owner)

    def test_pods_end_when_they_have_drained(self):
        values = chart.merged(chart.LEAST, {"coordinator": {"config": {"drain_timeout_secs": 90.5}}})
        manifests, _ = chart.render(chart.merged(values, {"worker": {"config": {"drain_timeout_secs": 600}}}))
        grace = {name: pod["terminationGracePeriodSeconds"] for name, pod in chart.pods(manifests) if "containers" in pod and "generate" not in name}
        self.assertEqual(grace, {"lockstep-coordinator": 116, "lockstep-worker": 620})

    def test_volumes_and_mounts_agree(self):
        for manifests, _ in RENDERED.values():
            claims = {m["metadata"]["name"]: [c["metadata"]["name"] for c in m["spec"].get("volumeClaimTemplates", [])] for m in chart.of_kind(manifests, "StatefulSet")}
            for owner, pod in chart.pods(manifests):
                volumes = {volume["name"] for volume in pod.get("volumes", [])} | set(claims.get(owner, []))
                mounted = {mount["name"] for container in chart.containers(pod) for mount in container.get("volumeMounts", [])}
                self.assertEqual(volumes, mounted, owner)

    def test_services_and_policies_select_pods(self):
        for manifests, _ in RENDERED.values():
            labels = [m["spec"]["template"]["metadata"]["labels"] for m in chart.of_kind(manifests, *chart.WORKLOADS)]
            for manifest in chart.of_kind(manifests, "Service", "NetworkPolicy", "PodDisruptionBudget"):
                spec = manifest["spec"]
                selector = spec["selector"] if manifest["kind"] == "Service" else (spec.get("selector") or spec["podSelector"])["matchLabels"]
                self.assertTrue([found for found in labels if selector.items() <= found.items()], manifest["metadata"]["name"])

    def test_only_members_reach_workers(self):
        for manifests, _ in RENDERED.values():
            rules = manifests["NetworkPolicy", "lockstep-worker"]["spec"]["ingress"]
            for rule in rules:
                parts = {peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component") for peer in rule["from"]}
                ports = [port["port"] for port in rule.get("ports", [])]
                self.assertIn((parts, ports), [({"worker"}, []), ({"coordinator"}, ["grpc"]), ({None}, ["metrics"])])


class Settings(unittest.TestCase):
    def test_keys_are_the_binary_s(self):
        schema = json.loads((chart.CHART / "values.schema.json").read_text())
        keys = {
            "coordinator": schema["properties"]["coordinator"]["properties"]["config"]["properties"],
            "worker": schema["$defs"]["pool"]["properties"]["config"]["properties"],
        }
        for command, known in keys.items():
            shown = subprocess.run([os.environ["LOCKSTEP_BIN"], command, "--help"], capture_output=True, text=True, check=True).stdout
            settings = shown.split("\n      --config ")[0]
            flags = {flag.replace("-", "_") for flag in re.findall(r"^ +--([a-z-]+)", settings, re.MULTILINE)}
            owned = set(OWNED[command].split())
            self.assertEqual(flags, owned | set(known), f"settings of {command}, and those of the chart")
            self.assertEqual(owned & set(known), set())

    def test_every_value_has_a_schema(self):
        """What values.yaml holds is allowed, and what the schema allows is in values.yaml."""
        schema = json.loads((chart.CHART / "values.schema.json").read_text())
        values = yaml.safe_load((chart.CHART / "values.yaml").read_text())
        open_ended = {"config", "requests", "limits", "global"}

        def compare(where, value, node):
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
            if "properties" not in node or where.split(".")[-1] in open_ended:
                return
            self.assertIs(node.get("additionalProperties"), False, where)
            self.assertEqual(set(value), set(node["properties"]) - {"global"}, where)
            for key, child in value.items():
                compare(f"{where}.{key}", child, node["properties"][key])

        compare("", values, schema)

    def test_bad_values_are_refused(self):
        refused = {
            "additional properties 'modle'": {"modle": {}},
            "additional properties 'gpu'": {"pools": {"a": {"gpu": 1}}},
            "additional properties 'polcy'": {"coordinator": {"config": {"polcy": "auto"}}},
            "'/coordinator/config/policy'": {"coordinator": {"config": {"policy": "tensor=two"}}},
            "'/worker/config/prefix_caching'": {"worker": {"config": {"prefix_caching": "yes"}}},
            "'/coordinator/replicas'": {"coordinator": {"replicas": 0}},
            "'/etcd/bundled/replicas'": {"etcd": {"bundled": {"replicas": 2}}},
            "'/model/uri'": {"model": {"uri": "ftp://host/file"}},
            "'/model/sha256'": {"model": {"sha256": "abc"}},
            "'/worker/resources/limits/memory'": {"worker": {"resources": {"limits": {"memory": "a lot"}}}},
            "propertyName 'etcd'": {"pools": {"etcd": {}}},
            "'/telemetry/traceRatio'": {"telemetry": {"traceRatio": 2}},
            "'/worker/config/device'": {"worker": {"gpus": 0, "config": {"device": "vulkan:0"}}},
            "'/worker/config/memory'": {"worker": {"config": {"memory": "16Gi"}}},
            "'/worker/tolerations/0/effect'": {"worker": {"tolerations": [{"key": "a", "operator": "Exists", "effect": "NoScheduling"}]}},
            "'/worker/tolerations/0/key'": {"worker": {"tolerations": [{"key": "a key", "operator": "Exists"}]}},
            "'/worker/tolerations/0/value'": {"worker": {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}},
            "missing property 'operator'": {"coordinator": {"tolerations": [{"value": "b"}]}},
            "missing property 'effect'": {"worker": {"tolerations": [{"key": "a", "tolerationSeconds": 5}]}},
            "invalid propertyName 'nodeAfinity'": {"worker": {"affinity": {"nodeAfinity": {}}}},
            "missing properties 'topologyKey', 'whenUnsatisfiable'": {"worker": {"topologySpreadConstraints": [{"maxSkew": 1}]}},
            "invalid propertyName 'memroy'": {"worker": {"resources": {"limits": {"memroy": "2Gi"}}}},
            "invalid propertyName 'a b'": {"worker": {"nodeSelector": {"a b": "c"}}},
            "invalid propertyName 'app.kubernetes.io/name'": {"worker": {"podLabels": {"app.kubernetes.io/name": "other"}}},
            "'/worker/env/0/name'": {"worker": {"env": [{"name": "A B"}]}},
            "'/worker/gpuResource'": {"worker": {"gpuResource": "gpu"}},
            "'/image/tag'": {"image": {"tag": "0.1.0-cpu"}},
            "'/image/repository'": {"image": {"repository": "registry:5000/lockstep:0.1.0"}},
            "several coordinators meet in etcd": {"coordinator": {"replicas": 2}},
            "or insecure=true": {"insecure": False},
            "model.uri or model.path": {"model": {"uri": ""}},
            "etcd.endpoints and etcd.mode=external": {"etcd": {"mode": "external"}},
            "tls.cluster.secretName": {"tls": {"cluster": {"mode": "secret"}}},
            "tls.clients.issuerRef.name": {"tls": {"clients": {"mode": "certManager"}}},
            "etcd would be spoken to in clear text": {"insecure": False, "etcd": {"mode": "bundled"}, "tls": ALL_TLS},
            "needs certificates (tls.clients.mode)": {"tls": {"clients": {"clientCa": {"secretName": "a"}}}},
            "none that can be read in place": {"model": {"uri": "hf://o/r/f.gguf", "stream": True}},
            "monitoring.prometheusUrl": {"worker": {"autoscaling": {"enabled": True}}},
            "ReadWriteMany is needed": {"worker": {"replicas": 2}, "model": {"cache": {"type": "persistentVolumeClaim", "accessModes": ["ReadWriteOnce"]}}},
        }
        self.check_refused(refused)

    def test_values_that_contradict_each_other_are_refused(self):
        """Each by an error that names both."""
        claim = {"type": "persistentVolumeClaim"}
        external = {"mode": "external", "endpoints": ["https://a:2379"]}
        scaled = {"enabled": True, "kind": "hpa", "minReplicas": 1}
        refused = {
            "model.path without model.uri and model.cache.type=emptyDir": {"model": PATH},
            "model.path without model.uri and model.cache.type=volumeClaimTemplate": {"model": {**PATH, "cache": {"type": "volumeClaimTemplate"}}},
            "model.cache.existingClaim must name the claim": {"model": {**PATH, "cache": claim}},
            "model.sha256 and model.path without model.uri": {"model": {**PATH, "sha256": "a" * 64, "cache": {**claim, "existingClaim": "m"}}},
            "model.stream=true and model.sha256": {"model": {"stream": True, "sha256": "a" * 64}},
            "model.stream=true and model.path": {"model": {"stream": True, "path": "a.gguf"}},
            "model.cache.readOnly=true and model.cache.type=emptyDir": {"model": {"cache": {"readOnly": True}}},
            "model.cache.accessModes=[ReadOnlyMany] and model.uri": {"model": {"cache": {**claim, "accessModes": ["ReadOnlyMany"]}}},
            "existingClaim=x and model.cache.accessModes=[ReadOnlyMany]": {"model": {"cache": {**claim, "existingClaim": "x", "accessModes": ["ReadOnlyMany"]}}},
            "and 4 workers, who share the claim": {"worker": {"autoscaling": scaled}, "model": {"cache": {**claim, "accessModes": ["ReadWriteOnce"]}}},
            "etcd.endpoints and etcd.mode=none": {"etcd": {"endpoints": ["http://a:2379"]}},
            "etcd.endpoints and etcd.mode=bundled": {"etcd": {"mode": "bundled", "endpoints": ["http://a:2379"]}},
            "etcd.tls.secretName and etcd.mode=none": {"etcd": {"tls": {"secretName": "a"}}},
            "etcd.prefix and etcd.mode=none": {"etcd": {"prefix": "/a"}},
            "etcd.user and etcd.mode=bundled": {"etcd": {"mode": "bundled", "user": {"name": "a", "secretName": "b"}}},
            "etcd.user.name and etcd.user.secretName": {"etcd": {**external, "user": {"name": "a"}}},
            "http://b:2379 is clear text and others are https://": {"etcd": {**external, "endpoints": ["https://a:2379", "http://b:2379"]}},
            "etcd.endpoints and etcd.tls.secretName=s": {"etcd": {"mode": "external", "endpoints": ["http://a:2379"], "tls": {"secretName": "s"}}},
            "tls.clients.secretName=s and tls.clients.mode=none": {"tls": {"clients": {"secretName": "s"}}},
            "tls.clients.clusterNames=false and tls.clients.dnsNames=[]": {"tls": {"clients": {**ACME, "dnsNames": []}}},
            "tls.clients.ca.from=system and tls.clients.ca.secretName=s": {"tls": {"clients": {**ACME, "ca": {"from": "system", "secretName": "s"}}}},
            "worker.config.device=cuda:0 and worker.gpus=0": {"worker": {"gpus": 0, "config": {"device": "cuda:0"}}},
            "pools.a.config.device=cuda:0 and pools.a.gpus=8": {"pools": {"a": {"gpus": 8, "config": {"device": "cuda:0"}}}},
            "worker.config.device=cpu and worker.gpus=1": {"worker": {"config": {"device": "cpu"}}},
            "worker.config.num_devices and worker.gpus=1": {"worker": {"config": {"num_devices": 2}}},
            "worker.config.device=cuda:0,cuda:0: names a device twice": {"worker": {"gpus": 2, "config": {"device": "cuda:0,cuda:0"}}},
            "worker.config.device=cuda:7 and worker.gpus=1": {"worker": {"config": {"device": "cuda:7"}}},
            "worker.config.dtype=f32 and worker.gpus=1": {"worker": {"config": {"dtype": "f32"}}},
            "2 replicas of 8 ranks, all workers together have 8 devices": {"coordinator": {"config": {"policy": "tensor=8,replicas=2"}}, "worker": {"gpus": 8}},
            "its 2 devices are there with the fewest workers": {"coordinator": {"config": {"policy": "tensor=1,replicas=2"}}, "worker": {"autoscaling": {**scaled, "minReplicas": 2}}},
            "worker.extraVolumes: a volume tmp is there already": {"worker": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}},
            "worker.extraVolumes: there is no volume a": {"worker": {"extraVolumeMounts": [{"name": "a", "mountPath": "/a"}]}},
            "worker.extraVolumeMounts: /models/ is mounted already": {"worker": {"extraVolumes": [{"name": "a", "emptyDir": {}}], "extraVolumeMounts": [{"name": "a", "mountPath": "/models/"}]}},
            "worker.sharedMemory=65Gi and worker.resources.limits.memory=64Gi": {"worker": {"sharedMemory": "65Gi"}},
            "model.cache.existingClaim=x and model.cache.type=emptyDir": {"model": {"cache": {"existingClaim": "x"}}},
            "model.cache.sizeLimit=5Gi and model.cache.type=hostPath": {"model": {"cache": {"type": "hostPath", "sizeLimit": "5Gi"}}},
            "tls.clients.dnsNames and tls.clients.mode=none": {"tls": {"clients": {"dnsNames": ["a.b"]}}},
            "worker.update.strategy=OnDelete and worker.update.partition=2": {"worker": {"update": {"strategy": "OnDelete", "partition": 2}}},
            "model.uri: holds a password or a signature": {"model": {"uri": "https://host/model.gguf?X-Amz-Expires=9&X-Amz-Signature=abc"}},
            "tls.cluster.renewBefore=240h and tls.cluster.duration=24h": {"tls": {"cluster": {"mode": "certManager", "duration": "24h"}}},
            "tls.cluster.renewBefore=24h and monitoring.rules.enabled=true": {"tls": {"cluster": {"mode": "certManager", "duration": "48h", "renewBefore": "24h"}}, "monitoring": {"rules": {"enabled": True}}},
            "a replica has 16 ranks, all workers together have 8 devices": {"coordinator": {"config": {"policy": "tensor=16"}}, "worker": {"gpus": 8}},
            "a replica has 8 ranks, all workers together have 4 devices": {"coordinator": {"config": {"policy": "hybrid=4x2,replicas=2"}}, "worker": {"gpus": 0, "replicas": 2, "config": {"num_devices": 2}}},
            "coordinator.config.min_workers=9 and the pools, which have 1": {"coordinator": {"config": {"min_workers": 9}}},
            "worker.hostNetwork=true and networkPolicy.enabled=true": {"worker": {"hostNetwork": True}},
            "worker.hostNetwork=true and worker.placement=pack": {"worker": {"hostNetwork": True, "placement": "pack"}},
            "worker.autoscaling.minReplicas=5 and worker.autoscaling.maxReplicas=2": {"worker": {"autoscaling": {**scaled, "minReplicas": 5, "maxReplicas": 2}}},
            "worker.resources.requests.memory=100Gi and worker.resources.limits.memory=64Gi": {"worker": {"resources": {"requests": {"memory": "100Gi"}}}},
            "coordinator.resources.requests.cpu=4500m and coordinator.resources.limits.cpu=4": {"coordinator": {"resources": {"requests": {"cpu": "4500m"}}}},
            "coordinator.service.grpcPort and coordinator.service.httpPort: both are 7070": {"coordinator": {"service": {"httpPort": 7070}}},
            "telemetry.otlpTls.secretName and telemetry.otlpEndpoint": {"telemetry": {"otlpTls": {"secretName": "a"}}},
            "tenants.testKey.secretName and tenants.secretName": {"tenants": {"testKey": {"secretName": "a"}}},
            "ingress.enabled=true and ingress.http.host": {"ingress": {"enabled": True}},
            "gateway.enabled=true and gateway.parentRefs=[]": {"gateway": {"enabled": True, "httpHostnames": ["a.b"]}},
            "gateway.enabled=true and gateway.httpHostnames": {"gateway": {"enabled": True, "parentRefs": [{"name": "a"}]}},
            "networkPolicy.clientsFrom and networkPolicy.enabled=false": {"networkPolicy": {"enabled": False, "clientsFrom": [{"podSelector": {}}]}},
            "networkPolicy.clientsFrom and networkPolicy.metricsFrom=[]": {"networkPolicy": {"clientsFrom": [{"podSelector": {}}]}, "monitoring": {"serviceMonitor": {"enabled": True}}},
        }
        self.check_refused(refused)

    def test_a_release_may_rest(self):
        values = chart.merged(chart.LEAST, {"worker": {"replicas": 0}, "coordinator": {"config": {"policy": "tensor=2"}}})
        manifests, _ = chart.render(values)
        self.assertEqual(manifests["ConfigMap", "lockstep"]["data"], {"min_workers": "1"})

    def test_names_fit_kubernetes(self):
        pool = "a" * 20
        self.check_refused({
            f"{'b' * 32}-{pool} has 53 characters, 52 are the most": {"fullnameOverride": "b" * 32, "pools": {pool: {}}},
            "'/fullnameOverride'": {"fullnameOverride": "my.app"},
            "'/nameOverride'": {"nameOverride": "1st"},
            "fullnameOverride: is needed": {"nameOverride": "", "@release": "3rd"},
            "'/model/path'": {"model": {"path": "../../etc/passwd"}},
            "'/model/uri'": {"model": {"uri": "hf://org/repo"}},
        })  # fmt: skip
        self.check_refused({"'/model/uri'": {"model": {"uri": "s3://bucket/folder/"}}})
        manifests, _ = chart.render(chart.merged(chart.LEAST, {"fullnameOverride": "b" * 31, "pools": {pool: {}}}))
        self.assertIn(("StatefulSet", f"{'b' * 31}-{pool}"), manifests)
        manifests, _ = chart.render(chart.LEAST, release="my.release")
        self.assertIn(("Service", "my-release-lockstep"), manifests)

    def test_numbers_are_quantities(self):
        """`cpu: 4` is what a number of processors looks like; the API server is given text."""
        given = {"requests": {"cpu": 0.5, "memory": 1073741824}, "limits": {"cpu": 4, "memory": "64Gi"}}
        manifests, _ = chart.render(chart.merged(chart.LEAST, {"worker": {"resources": given}}))
        worker = manifests["StatefulSet", "lockstep-worker"]["spec"]["template"]["spec"]["containers"][0]
        self.assertEqual(worker["resources"]["limits"], {"cpu": "4", "memory": "64Gi", "nvidia.com/gpu": "1"})
        self.assertEqual(worker["resources"]["requests"]["cpu"], "0.5")
        self.assertEqual(float(worker["resources"]["requests"]["memory"]), 1073741824)

    def check_refused(self, refused):
        for message, change in refused.items():
            change = dict(change)
            release = change.pop("@release", "lockstep")
            with self.subTest(message):
                with self.assertRaises(helm.HelmError) as raised:
                    chart.render(chart.merged(chart.LEAST, change), release=release)
                self.assertIn(message, str(raised.exception))


class Upgrades(unittest.TestCase):
    CHANGES = [
        {"coordinator": {"config": {"policy": "auto", "max_num_sequences": 7}}},
        {"worker": {"replicas": 5, "gpus": 4, "config": {"memory": "1GiB"}, "sharedMemory": "1Gi", "hostIPC": True}},
        {"worker": {"resources": {"limits": {"memory": "999Gi"}}, "update": {"partition": 1}, "autoscaling": {"enabled": True, "kind": "hpa"}}},
        {"image": {"tag": "9.9.9", "repository": "elsewhere/lockstep"}, "telemetry": {"otlpEndpoint": "http://c:4317"}},
        {"model": {"uri": "https://host/other.gguf", "path": "", "sha256": "0" * 64, "stream": False}},
        {"insecure": True, "tls": {"cluster": {"mode": "secret", "secretName": "members"}}},
        {"etcd": {"bundled": {"image": {"tag": "3.5.17-0"}, "resources": {"limits": {"memory": "2Gi"}}}}},
        {"etcd": {"bundled": {"replicas": 5}}},
        {"tenants": {"secretName": "others"}, "priorityClass": {"create": True}, "monitoring": {"rules": {"enabled": True}}},
    ]

    def immutable(self, manifests):
        """By name, of what has any."""
        parts = {key: apiserver.fixed(manifest) for key, manifest in manifests.items()}
        return {key: part for key, part in parts.items() if part is not None}

    def test_what_cannot_change_is_told(self):
        """Values that the API server refuses to change are those of the guide's table."""
        models = {"model": {"cache": {"type": "volumeClaimTemplate", "accessModes": ["ReadWriteOnce"]}}}
        shared = {"model": {"cache": {"type": "persistentVolumeClaim"}}}
        bundled = {"etcd": {"mode": "bundled"}}
        changes = {
            "model.cache.type": (models, shared),
            "model.cache.size": (models, {"model": {"cache": {"size": "7Gi"}}}),
            "model.cache.storageClassName": (shared, {"model": {"cache": {"storageClassName": "slow"}}}),
            "model.cache.accessModes": (shared, {"model": {"cache": {"accessModes": ["ReadWriteMany", "ReadOnlyMany"]}}}),
            "model.stream": (models, {"model": {"stream": True}}),
            "etcd.bundled.storage.size": (bundled, {"etcd": {"bundled": {"storage": {"size": "9Gi"}}}}),
            "etcd.bundled.storage.storageClassName": (bundled, {"etcd": {"bundled": {"storage": {"storageClassName": "slow"}}}}),
            "priorityClass.value": ({"priorityClass": {"create": True}}, {"priorityClass": {"value": 7}}),
            "nameOverride": ({"fullnameOverride": "lockstep"}, {"nameOverride": "other"}),
            "fullnameOverride": ({}, {"fullnameOverride": "other"}),
        }
        for key, (values, change) in changes.items():
            values = chart.merged(chart.LEAST, values)
            before, after = (self.immutable(chart.render(v)[0]) for v in (values, chart.merged(values, change)))
            self.assertNotEqual(before, after, key)
        page = (chart.REPOSITORY / "docs/deploy.md").read_text()
        told = re.findall(r"^\| (`[a-z].*?) \|", page.split("## Upgrades")[1].split("\n## ")[0], re.MULTILINE)
        self.assertEqual(set(re.findall(r"`([\w.]+)`", " ".join(told))), set(changes))

    def test_nothing_is_recreated(self):
        for name in chart.EXAMPLES:
            values = chart.values_of(name)
            before = self.immutable(chart.render(values)[0])
            for change in self.CHANGES:
                with self.subTest(name, change=change):
                    after = self.immutable(chart.render(chart.merged(values, change))[0])
                    self.assertEqual({name: after.get(name) for name in before}, before)

    def test_a_new_version_of_the_chart_changes_its_images_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            copied = pathlib.Path(folder) / "lockstep"
            subprocess.run(["cp", "-r", str(chart.CHART), str(copied)], check=True)
            text = (copied / "Chart.yaml").read_text()
            (copied / "Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 8.8.8", text))
            newer = helm.Chart.load(str(copied))
            for name in chart.EXAMPLES:
                values = chart.merged(chart.values_of(name), {"image": {"tag": "1"}})
                before, after = chart.render(values)[0], chart.render(values, newer)[0]
                self.assertEqual(self.immutable(before), self.immutable(after))
                for one, other in zip(chart.of_kind(before, *chart.WORKLOADS), chart.of_kind(after, *chart.WORKLOADS)):
                    self.assertEqual(one["spec"]["template"], other["spec"]["template"], name)

    def test_scaling_starts_no_pod_anew(self):
        values = chart.values_of("tensor-2x8")
        before, after = chart.render(values)[0], chart.render(chart.merged(values, {"worker": {"replicas": 3}}))[0]
        for key in (("Deployment", "lockstep-coordinator"), ("StatefulSet", "lockstep-worker")):
            self.assertEqual(before[key]["spec"]["template"], after[key]["spec"]["template"])
        self.assertEqual(after["ConfigMap", "lockstep"]["data"], {"min_workers": "3"})


if __name__ == "__main__":
    unittest.main()
