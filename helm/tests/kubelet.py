"""Pods of rendered manifests as processes of this machine: what a node would do, in small.

Every pod has an address of the loopback net of its own, so ports are the rendered ones. Names of services become addresses,
mounts become folders below one temporary folder, and nothing else of a command line or a settings file is changed.
Invariant: all processes end with the `Node`; a container that ends is started again, as Kubernetes does.
"""

import os
import pathlib
import random
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.request

import chart

# Longest wait for anything.
PATIENCE = 60
UNVERIFIED = ssl._create_unverified_context()


class Pod:
    def __init__(self, node, name, spec, address, metadata):
        self.node, self.name, self.spec, self.address = node, name, spec, address
        self.labels, self.annotations = metadata["labels"], metadata.get("annotations", {})
        self.init, self.process, self.starts, self.is_ending = None, None, 0, False
        self.folder = node.folder / name
        self.log = self.folder / "log"
        self.folder.mkdir(exist_ok=True)
        # What a pod of that name had before is no more, but for what a template claimed.
        for volume in spec.get("volumes", []):
            shutil.rmtree(self.folder / volume["name"], ignore_errors=True)

    def path_of(self, volume):
        """The folder that a volume is here, filled as its kind says."""
        if "persistentVolumeClaim" in volume:
            return self.node.shared(volume["persistentVolumeClaim"]["claimName"])
        if volume["name"] == "models":
            # Workers are told one path by their coordinator, so here they also share what each would have for itself.
            return self.node.shared("models")
        path = self.folder / volume["name"]
        if path.exists():
            return path
        path.mkdir()
        if "downwardAPI" in volume:
            for item in volume["downwardAPI"]["items"]:
                key = re.fullmatch(r"metadata\.annotations\['(.*)'\]", item["fieldRef"]["fieldPath"])[1]
                (path / item["path"]).write_text(self.localize(self.annotations[key]))
        elif "secret" in volume:
            secret = self.node.secrets[volume["secret"]["secretName"]]
            wanted = {item["key"]: item["path"] for item in volume["secret"].get("items", [])} or {key: key for key in secret}
            for key, name in wanted.items():
                (path / name).write_text(secret[key])
        return path

    def localize(self, text):
        """Addresses and paths as they are here."""
        text = text.replace("0.0.0.0:", f"{self.address}:")
        # Of the name that an init container fills in, where it is part of an address.
        text = re.sub(r"\$\{NAME\}(?=\.)", self.name, text)
        for name, address in self.node.names():
            text = text.replace(name, address)
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        # Coordinators mount no models, but name them.
        mounts = {"/models": {"name": "models"}}
        for container in chart.containers(self.spec):
            for mount in container.get("volumeMounts", []):
                mounts[mount["mountPath"]] = volumes.get(mount["name"], {"name": mount["name"]})
        paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
        return re.sub(rf"(?<![\w/.])({paths})(?=[/\"\s]|$)", lambda match: str(self.path_of(mounts[match[1]])), text)

    def environment(self, container):
        variables = {"PATH": os.environ["PATH"]}
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                value = {"metadata.name": self.name, "status.podIP": self.address}[source["fieldRef"]["fieldPath"]]
            elif "configMapKeyRef" in source:
                value = self.node.manifests["ConfigMap", source["configMapKeyRef"]["name"]]["data"][source["configMapKeyRef"]["key"]]
            elif "secretKeyRef" in source:
                value = self.node.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                value = self.localize(variable["value"])
            variables[variable["name"]] = value
        return variables

    def run(self, container):
        """Starts a container as a process."""
        command = container.get("command") or [os.environ["LOCKSTEP_BIN"]]
        variables = self.environment(container)
        expand = lambda text: re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text)
        arguments = [self.localize(expand(argument)) for argument in container.get("args", [])]
        with open(self.log, "a") as log:
            return subprocess.Popen(
                [*command, *arguments], env=variables, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def live(self):
        """Init containers to their end, then the one container for as long as the pod is wanted."""
        for container in self.spec.get("initContainers", []):
            while True:
                self.init = self.run(container)
                if self.init.wait() == 0:
                    break
                if self.is_ending:
                    return
                time.sleep(0.5)
        while not self.is_ending:
            self.starts += 1
            self.process = self.run(self.spec["containers"][0])
            self.process.wait()
            time.sleep(0.5)

    @property
    def running(self):
        """What runs of it: the one container, or one before it."""
        return self.process or self.init

    def start(self):
        self.thread = threading.Thread(target=self.live, daemon=True)
        self.thread.start()

    def probe(self, kind):
        """Whether a probe succeeds, as the node asks it; certificates are not checked."""
        container = self.spec["containers"][0]
        probe = container[kind]
        if "exec" in probe:
            # Every pod has a localhost of its own.
            command = [self.localize(part).replace("//localhost:", f"//{self.address}:") for part in probe["exec"]["command"]]
            command[0] = {"lockstep": os.environ["LOCKSTEP_BIN"]}[command[0]]
            return subprocess.run(command, capture_output=True, timeout=PATIENCE).returncode == 0
        how = probe.get("httpGet") or probe["tcpSocket"]
        port = next(port["containerPort"] for port in container["ports"] if port["name"] == how["port"])
        try:
            if "tcpSocket" in probe:
                socket.create_connection((self.address, port), 1).close()
                return True
            url = f"{how.get('scheme', 'HTTP').lower()}://{self.address}:{port}{how['path']}"
            with urllib.request.urlopen(url, timeout=2, context=UNVERIFIED if url.startswith("https") else None):
                return True
        except OSError:
            return False

    def terminate(self):
        """SIGTERM, and SIGKILL after the pod's grace period; returns the exit status."""
        self.is_ending = True
        process = self.running
        if process is None:
            return None
        process.terminate()
        try:
            return process.wait(self.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def listening_ports(self):
        """TCP ports on which the process listens."""
        inodes = set()
        for descriptor in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
            except OSError:
                pass
        rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


class Node:
    def __init__(self, manifests, secrets=None):
        self.manifests, self.secrets = manifests, secrets or {}
        self.folder = pathlib.Path(tempfile.mkdtemp())
        # Not the addresses of other tests that run at the same time.
        self.net = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        self.pods, self.addresses = {}, {}
        for manifest in chart.of_kind(manifests, *chart.WORKLOADS):
            template = manifest["spec"]["template"]
            for index in range(manifest["spec"].get("replicas", 2)):
                self.add(manifest["metadata"]["name"], index, template)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pod in self.pods.values():
            pod.is_ending = True
            if pod.running and pod.running.poll() is None:
                pod.running.kill()
        for pod in self.pods.values():
            if pod.running:
                pod.running.wait()
        if error[0]:
            for pod in self.pods.values():
                lines = pod.log.read_text().splitlines() if pod.log.exists() else []
                print(f"== {pod.name}", *lines[-15:], sep="\n")
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, owner, index, template):
        """A pod under the address that its name always has."""
        name = f"{owner}-{index}"
        address = self.addresses.setdefault(name, f"{self.net}.{len(self.addresses) + 1}")
        self.pods[name] = Pod(self, name, template["spec"], address, template["metadata"])
        return self.pods[name]

    def roll(self, manifests, kind, name):
        """What the controller of a StatefulSet makes of a new manifest: pods that are more, at once, then the others anew,
        the last first, each when the one before is ready. Volumes stay."""
        before, after = self.manifests[kind, name]["spec"]["replicas"], manifests[kind, name]["spec"]["replicas"]
        template = manifests[kind, name]["spec"]["template"]
        self.manifests = {**self.manifests, **manifests}
        added = [self.add(name, index, template) for index in range(before, after)]
        for pod in added:
            pod.start()
        if added:
            self.wait_ready(added)
        for index in reversed(range(before)):
            self.replace(name, index)

    def replace(self, owner, index, is_volume_lost=False, waits=True):
        """Ends a pod and starts one of its name, of the manifest that is in force."""
        name = f"{owner}-{index}"
        self.pods[name].terminate()
        for kind in chart.WORKLOADS:
            if (kind, owner) in self.manifests:
                spec = self.manifests[kind, owner]["spec"]
        for claim in spec.get("volumeClaimTemplates", []) if is_volume_lost else []:
            shutil.rmtree(self.pods[name].folder / claim["metadata"]["name"])
        pod = self.add(owner, index, spec["template"])
        pod.start()
        if waits:
            self.wait_ready([pod])

    def shared(self, name):
        path = self.folder / f"claim-{name}"
        path.mkdir(exist_ok=True)
        return path

    def of(self, component):
        return [pod for pod in self.pods.values() if pod.labels["app.kubernetes.io/component"] == component]

    def names(self):
        """What the cluster's DNS would answer: longest names first; a service is the first pod that it selects."""
        for service in chart.of_kind(self.manifests, "Service"):
            name = f"{service['metadata']['name']}.serving.svc"
            chosen = [pod for pod in self.pods.values() if service["spec"]["selector"].items() <= pod.labels.items()]
            for pod in chosen:
                yield f"{pod.name}.{name}", pod.address
        for service in sorted(chart.of_kind(self.manifests, "Service"), key=lambda s: -len(s["metadata"]["name"])):
            chosen = [pod for pod in self.pods.values() if service["spec"]["selector"].items() <= pod.labels.items()]
            yield f"{service['metadata']['name']}.serving.svc", chosen[0].address

    def start(self):
        for pod in self.pods.values():
            pod.start()

    def wait_ready(self, pods=None):
        """Waits until every readiness probe succeeds, of all pods or of these; returns the seconds that it took."""
        begin = time.monotonic()
        while True:
            missing = [pod.name for pod in pods or self.pods.values() if not pod.probe("readinessProbe")]
            if not missing:
                return time.monotonic() - begin
            if time.monotonic() - begin > PATIENCE:
                raise AssertionError(f"not ready: {missing}")
            time.sleep(0.1)

    def run_test_pod(self):
        """`helm test`: exit status and output."""
        manifest = next(m for m in chart.of_kind(self.manifests, "Pod"))
        pod = Pod(self, manifest["metadata"]["name"], manifest["spec"], f"{self.net}.254", {"labels": {}})
        status = pod.run(manifest["spec"]["containers"][0]).wait(PATIENCE)
        return status, pod.log.read_text()
