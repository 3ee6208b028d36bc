"""What an operator relies on in rendered manifests: rollouts that can be left, identities, networks, certificates and caches.

Beside test_chart.py, which holds all manifests against schemas and house rules.
"""

import ipaddress
import re
import unittest

import chart

URI = "hf://org/repo/m.gguf"
PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
PUBLIC = {"namespaceSelector": {"matchLabels": {"serves": "public"}}}


def render(*changes):
    values = chart.LEAST
    for change in changes:
        values = chart.merged(values, change)
    return chart.render(values)[0]


def pod_of(manifests, name):
    return next(pod for owner, pod in chart.pods(manifests) if owner == name)


def arguments(manifests, name):
    return pod_of(manifests, name)["containers"][0]["args"]


def settings_of(manifests, kind, name):
    return manifests[kind, name]["spec"]["template"]["metadata"]["annotations"]["lockstep.dev/settings"]


def matches(selector, labels):
    return selector.get("matchLabels", {}).items() <= labels.items()


def reaches(manifests, policy, port, labels=None, namespace=None, address=None):
    """Whether a NetworkPolicy lets someone in: a pod of this release's namespace, of another namespace, or an address."""
    for rule in manifests["NetworkPolicy", f"lockstep-{policy}"]["spec"]["ingress"]:
        if "ports" in rule and port not in [allowed["port"] for allowed in rule["ports"]]:
            continue
        for peer in rule.get("from", [{"namespaceSelector": {}}, {"ipBlock": {"cidr": "0.0.0.0/0"}}]):
            if address and "ipBlock" in peer and ipaddress.ip_address(address) in ipaddress.ip_network(peer["ipBlock"]["cidr"]):
                return True
            if labels is not None and "podSelector" in peer and matches(peer["podSelector"], labels):
                return True
            if namespace is not None and "namespaceSelector" in peer and matches(peer["namespaceSelector"], namespace):
                return True
    return False


class Rollouts(unittest.TestCase):
    def test_a_rollout_never_waits_for_a_pod_that_cannot_get_ready(self):
        """Where nothing serves no coordinator is ready: neither the one that mends it, nor, with as many nodes as
        coordinators that avoid each other, one more than there were."""
        for name in chart.EXAMPLES:
            manifests, notes = chart.render(chart.values_of(name))
            spec = manifests["Deployment", "lockstep-coordinator"]["spec"]
            strategy = spec["strategy"]
            self.assertTrue(strategy["type"] == "Recreate" or strategy["rollingUpdate"]["maxUnavailable"] >= 1, name)
            # Helm's --wait and `rollout status` are no more patient than this.
            minutes = int(re.search(r"--timeout=(\d+)m", notes)[1])
            self.assertGreaterEqual(spec["progressDeadlineSeconds"], 60 * minutes, name)

    def test_every_revision_has_its_own_settings(self):
        """A pod that is held back, or that a rollback makes, starts with what its own revision says, and with nothing that
        an upgrade has changed for others."""
        manifests = render({"etcd": {"mode": "bundled"}})
        for owner, pod in chart.pods(manifests):
            for volume in pod.get("volumes", []):
                self.assertNotIn("configMap", volume, owner)
        for kind, name, key in (("Deployment", "coordinator", "model"), ("StatefulSet", "worker", "kernel_cache"), ("StatefulSet", "etcd", "data-dir")):
            self.assertRegex(settings_of(manifests, kind, f"lockstep-{name}"), rf"(?m)^{key}\b")
        given = render({"coordinator": {"config": {"min_workers": 1}}})
        self.assertIn("\nmin_workers = 1\n", settings_of(given, "Deployment", "lockstep-coordinator"))
        names = [variable["name"] for variable in pod_of(given, "lockstep-coordinator")["containers"][0]["env"]]
        self.assertNotIn("LOCKSTEP_MIN_WORKERS", names)

    def test_a_pull_has_the_worker_s_surroundings(self):
        """A proxy, or the authority of a store of one's own."""
        authority = {"name": "authority", "configMap": {"name": "company-ca"}}
        mount = {"name": "authority", "mountPath": "/etc/company", "readOnly": True}
        proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
        pod = pod_of(render({"worker": {"env": [proxy], "extraVolumes": [authority], "extraVolumeMounts": [mount]}}), "lockstep-worker")
        self.assertIn(authority, pod["volumes"])
        for container in chart.containers(pod):
            self.assertIn(mount, container["volumeMounts"])
            self.assertIn(proxy, container["env"])

    def test_a_pool_can_be_held_back(self):
        updates = {"a": {}, "b": {"partition": 4}, "c": {"strategy": "OnDelete"}, "d": {"maxUnavailable": "10%"}}
        manifests = render({"pools": {name: {"replicas": 4, "update": update} for name, update in updates.items()}})
        strategies = {pool: manifests["StatefulSet", f"lockstep-{pool}"]["spec"]["updateStrategy"] for pool in updates}
        self.assertEqual(strategies["a"], {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}})
        self.assertEqual(strategies["b"]["rollingUpdate"], {"partition": 4})
        self.assertEqual(strategies["c"], {"type": "OnDelete"})
        self.assertEqual(strategies["d"]["rollingUpdate"], {"partition": 0, "maxUnavailable": "10%"})
        chart.check_schema(manifests["StatefulSet", "lockstep-d"], "1.37")

    def test_coordinators_can_wait_for_a_model_s_files(self):
        """Workers pull the new model beside the old one, which the coordinators that run still want."""
        cache = {"model": {"cache": {"type": "hostPath"}}}
        before = render(cache)
        after = render(cache, {"model": {"uri": "https://host/next.gguf"}, "coordinator": {"paused": True}})
        self.assertTrue(after["Deployment", "lockstep-coordinator"]["spec"]["paused"])
        outputs = [pod_of(manifests, "lockstep-worker")["initContainers"][0]["args"][2] for manifests in (before, after)]
        self.assertEqual(len(set(outputs)), 2)
        workers = [settings_of(manifests, "StatefulSet", "lockstep-worker") for manifests in (before, after)]
        self.assertEqual(*workers)

    def test_what_is_scaled_by_another_names_no_number_of_its_own(self):
        scaled = {"autoscaling": {"enabled": True, "kind": "hpa"}}
        manifests = render({"coordinator": scaled, "worker": scaled, "etcd": {"mode": "bundled"}})
        for key in (("Deployment", "lockstep-coordinator"), ("StatefulSet", "lockstep-worker")):
            self.assertNotIn("replicas", manifests[key]["spec"])

    def test_nodes_can_be_emptied_of_what_serves_nothing(self):
        """But a member of etcd that is not ready may hold the data that makes a majority."""
        manifests = render({"etcd": {"mode": "bundled"}})
        budgets = {m["metadata"]["name"]: m["spec"] for m in chart.of_kind(manifests, "PodDisruptionBudget")}
        policies = {name: spec.get("unhealthyPodEvictionPolicy") for name, spec in budgets.items()}
        self.assertEqual(policies, {"lockstep-coordinator": "AlwaysAllow", "lockstep-worker": "AlwaysAllow", "lockstep-etcd": None})

    def test_images_can_be_pinned(self):
        cpu, cuda, etcd = (f"sha256:{digit * 64}" for digit in "abc")
        images = {"image": {"repository": "r/lockstep", "digests": {"cpu": cpu, "cuda": cuda}}}
        manifests = render(images, {"etcd": {"mode": "bundled", "bundled": {"image": {"digest": etcd}}}})
        found = {owner: pod["containers"][0]["image"] for owner, pod in chart.pods(manifests)}
        expected = {"coordinator": f"r/lockstep@{cpu}", "generate": f"r/lockstep@{cpu}", "worker": f"r/lockstep@{cuda}"}
        expected["etcd"] = f"registry.k8s.io/etcd@{etcd}"
        self.assertEqual(found, {f"lockstep-{name}": image for name, image in expected.items()})


class Identities(unittest.TestCase):
    def test_rights_to_the_model_are_the_workers_alone(self):
        manifests, _ = chart.render(chart.values_of("object-store"))
        accounts = {owner: pod["serviceAccountName"] for owner, pod in chart.pods(manifests)}
        worker = accounts.pop("lockstep-worker")
        self.assertIn("eks.amazonaws.com/role-arn", manifests["ServiceAccount", worker]["metadata"]["annotations"])
        for owner, account in accounts.items():
            self.assertNotEqual(account, worker, owner)
            self.assertNotIn("annotations", manifests["ServiceAccount", account]["metadata"])
        given = render({"serviceAccount": {"create": False, "name": "ours"}})
        self.assertEqual({pod["serviceAccountName"] for _, pod in chart.pods(given)}, {"ours"})

    def test_releases_of_two_namespaces_do_not_share_a_class(self):
        manifests = render({"priorityClass": {"create": True}})
        self.assertIn(("PriorityClass", "serving-lockstep"), manifests)
        self.assertEqual(pod_of(manifests, "lockstep-worker")["priorityClassName"], "serving-lockstep")


    def test_namespaces_may_be_restricted(self):
        """Nothing that the Pod Security level `restricted` refuses, unless values ask for parts of the node."""
        allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
        asking = {"tensor-2x8": {"hostPath"}, "hybrid": {"hostIPC"}}
        for name in chart.EXAMPLES:
            manifests, _ = chart.render(chart.values_of(name))
            found = set()
            for _, pod in chart.pods(manifests):
                found |= {kind for volume in pod.get("volumes", []) for kind in volume if kind != "name"} - allowed
                found |= {part for part in ("hostIPC", "hostNetwork", "hostPID") if pod.get(part)}
            self.assertEqual(found, asking.get(name, set()), name)


class Networks(unittest.TestCase):
    def test_clients_that_are_named_leave_room_for_checks(self):
        policy = {"clientsFrom": [PUBLIC], "metricsFrom": [PROMETHEUS]}
        manifests = render({"networkPolicy": policy, "monitoring": {"serviceMonitor": {"enabled": True}}})
        test = manifests["Pod", "lockstep-generate"]["metadata"]["labels"]
        worker = manifests["StatefulSet", "lockstep-worker"]["spec"]["template"]["metadata"]["labels"]
        monitoring, public = {"kubernetes.io/metadata.name": "monitoring"}, {"serves": "public"}
        for port, allowed in {"grpc": (True, True, False, True), "http": (False, False, True, True)}.items():
            found = (
                reaches(manifests, "coordinator", port, labels=test),
                reaches(manifests, "coordinator", port, labels=worker),
                reaches(manifests, "coordinator", port, namespace=monitoring),
                reaches(manifests, "coordinator", port, namespace=public),
            )
            self.assertEqual(found, allowed, port)
            self.assertFalse(reaches(manifests, "coordinator", port, namespace={"kubernetes.io/metadata.name": "other"}))
            self.assertFalse(reaches(manifests, "coordinator", port, labels={"app": "other"}))
        self.assertTrue(reaches(manifests, "worker", "metrics", namespace=monitoring))
        self.assertFalse(reaches(manifests, "worker", "metrics", namespace=public))

    def test_workers_on_their_nodes_network_are_let_in(self):
        nodes = {"networkPolicy": {"nodes": ["10.1.0.0/16", "fd00::/8"]}, "etcd": {"mode": "bundled"}, "worker": {"hostNetwork": True}}
        manifests = render(nodes)
        for policy, port in (("coordinator", "grpc"), ("worker", "ranks"), ("worker", "12345"), ("etcd", "client")):
            self.assertTrue(reaches(manifests, policy, port, address="10.1.2.3"), policy)
            self.assertTrue(reaches(manifests, policy, port, address="fd00::1"), policy)
        self.assertFalse(reaches(manifests, "etcd", "client", address="10.2.0.1"))
        self.assertFalse(reaches(manifests, "etcd", "peer", address="10.1.2.3"))

    def test_pods_of_ipv6_listen_on_its_addresses(self):
        manifests = render({"ipFamily": "IPv6", "etcd": {"mode": "bundled"}})
        text = "".join(settings_of(manifests, kind, name) for kind, name in manifests if kind in chart.WORKLOADS)
        self.assertNotIn("0.0.0.0", text)
        for address in ('grpc_listen = "[::]:7070"', 'rank_listen = "[::]:7073"', "listen-peer-urls: http://[::]:2380"):
            self.assertIn(address, text)

    def test_the_node_s_shared_memory_is_not_hidden(self):
        """With hostIPC ranks of two pods meet in the node's /dev/shm, if NCCL knows that they are on one node."""
        for is_shared in (False, True):
            pod = pod_of(render({"worker": {"hostIPC": is_shared, "gpus": 2}}), "lockstep-worker")
            mounted = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
            self.assertEqual("/dev/shm" in mounted, not is_shared)
            variables = {variable["name"]: variable for variable in pod["containers"][0]["env"]}
            host = variables.get("NCCL_HOSTID", {}).get("valueFrom")
            self.assertEqual(host, {"fieldRef": {"fieldPath": "spec.nodeName"}} if is_shared else None)


class Certificates(unittest.TestCase):
    ACME = {"mode": "certManager", "issuerRef": {"name": "acme"}, "clusterNames": False, "dnsNames": ["llm.example.org"]}
    MONITORED = {"monitoring": {"serviceMonitor": {"enabled": True}}}

    def scraped(self, manifests):
        return manifests["ServiceMonitor", "lockstep-members"]["spec"]["endpoints"][0]["tlsConfig"]

    def test_a_public_authority_is_asked_for_public_names(self):
        """ACME certifies no name of a cluster, and its secrets have no ca.crt."""
        clients = {"tls": {"clients": {**self.ACME, "ca": {"from": "system"}}}}
        manifests = render(clients, self.MONITORED)
        self.assertEqual(manifests["Certificate", "lockstep-clients"]["spec"]["dnsNames"], ["llm.example.org"])
        self.assertEqual(self.scraped(manifests), {"serverName": "llm.example.org"})
        test = arguments(manifests, "lockstep-generate")
        self.assertIn("--tls-server-name=llm.example.org", test)
        self.assertFalse([part for part in test if part.startswith("--tls-ca")])
        self.assertEqual(pod_of(manifests, "lockstep-generate").get("volumes", []), [])

    def test_a_private_authority_is_that_of_the_secret_or_of_another(self):
        own = render({"tls": {"clients": {**self.ACME, "clusterNames": True}}}, self.MONITORED)
        names = own["Certificate", "lockstep-clients"]["spec"]["dnsNames"]
        self.assertLessEqual({"localhost", "lockstep.serving.svc", "llm.example.org"}, set(names))
        self.assertEqual(self.scraped(own)["ca"]["secret"], {"name": "lockstep-clients-tls", "key": "ca.crt"})
        self.assertEqual(self.scraped(own)["serverName"], "lockstep.serving.svc")
        supplied = {"mode": "secret", "secretName": "pair", "ca": {"secretName": "company", "key": "root.pem"}, "serverName": "llm"}
        manifests = render({"tls": {"clients": supplied}}, self.MONITORED)
        self.assertEqual(self.scraped(manifests), {"ca": {"secret": {"name": "company", "key": "root.pem"}}, "serverName": "llm"})
        volume = pod_of(manifests, "lockstep-generate")["volumes"][0]["secret"]
        self.assertEqual(volume, {"secretName": "company", "items": [{"key": "root.pem", "path": "ca.crt"}]})
        self.assertIn("--tls-server-name=llm", arguments(manifests, "lockstep-generate"))

    def test_issuers_of_other_makers_are_taken(self):
        issuer = {"name": "pca", "kind": "AWSPCAClusterIssuer", "group": "awspca.cert-manager.io"}
        manifests = render({"tls": {"clients": {**self.ACME, "issuerRef": issuer}}})
        self.assertEqual(manifests["Certificate", "lockstep-clients"]["spec"]["issuerRef"], issuer)

    def test_without_a_key_the_test_asks_what_needs_none(self):
        tenants = {"tenants": {"secretName": "tenants"}}
        self.assertEqual(arguments(render(tenants), "lockstep-generate")[0], "health")
        key = {"tenants": {"testKey": {"secretName": "key"}}}
        self.assertEqual(arguments(render(tenants, key), "lockstep-generate")[0], "generate")


class Caches(unittest.TestCase):
    def path(self, **model):
        manifests = render({"model": {"uri": URI, **model}})
        text = settings_of(manifests, "Deployment", "lockstep-coordinator")
        path = re.search(r'^model = "(.*)"$', text, re.MULTILINE)[1]
        if model.get("uri", URI):
            pull = pod_of(manifests, "lockstep-worker")["initContainers"][0]["args"]
            self.assertIn(f"--output={path}", pull)
        return path

    def test_another_model_of_the_same_name_is_another_file(self):
        others = [
            {},
            {"uri": "hf://org/repo/m.gguf@v2"},
            {"uri": "hf://org/other/m.gguf"},
            {"uri": "s3://bucket/m.gguf"},
            {"uri": "https://host/m.gguf?version=1"},
            {"uri": "https://host/m.gguf?version=2"},
            {"sha256": "0" * 64},
        ]
        paths = [self.path(**model) for model in others]
        self.assertEqual(len(set(paths)), len(others), paths)
        self.assertEqual({path.rsplit("/", 1)[1] for path in paths}, {"m.gguf"})
        # Where it was fetched from does not matter to a file whose contents are known.
        known = [self.path(uri=f"https://host/m.gguf?signature={index}", sha256="Ab" * 32) for index in range(2)]
        self.assertEqual(known[0], known[1])
        self.assertEqual(self.path(uri="https://host/get?id=7", path="m.gguf").rsplit("/", 1)[1], "m.gguf")
        there = {"type": "persistentVolumeClaim", "existingClaim": "models"}
        self.assertEqual(self.path(uri="", path="a/m.gguf", cache=there), "/models/a/m.gguf")

    def test_what_is_only_read_is_mounted_so(self):
        claim = {"type": "persistentVolumeClaim", "existingClaim": "models"}
        volume = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
        read_only = {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
        written = pod_of(render({"model": {"cache": claim}}), "lockstep-worker")
        self.assertIn(volume, written["volumes"])
        self.assertIn({"name": "models", "mountPath": "/models"}, written["initContainers"][0]["volumeMounts"])
        for model in ({"uri": "", "path": "m.gguf", "cache": claim}, {"cache": {**claim, "readOnly": True}}):
            pod = pod_of(render({"model": model}), "lockstep-worker")
            self.assertIn(read_only, pod["volumes"])
            for container in chart.containers(pod):
                self.assertIn({"name": "models", "mountPath": "/models", "readOnly": True}, container["volumeMounts"])


if __name__ == "__main__":
    unittest.main()
