"""Releases by Helm itself against an API server in small (apiserver.py): installed, changed, rolled back, uninstalled."""

import unittest

import helm_python as helm

import chart
from apiserver import ApiServer

NAMESPACE = "serving"
COORDINATOR, WORKER = ("Deployment", "lockstep-coordinator"), ("StatefulSet", "lockstep-worker")


class Releases(unittest.TestCase):
    def setUp(self):
        self.api = self.enterContext(ApiServer())
        self.helm = helm.Config(kube_apiserver=self.api.url, namespace=NAMESPACE, storage_driver="memory", burst_limit=1000, qps=1000.0)
        self.addCleanup(self.helm.close)

    def install(self, values):
        return self.helm.install(chart.LOADED, "lockstep", values, namespace=NAMESPACE)["status"]

    def upgrade(self, values):
        return self.helm.upgrade(chart.LOADED, "lockstep", values, namespace=NAMESPACE)["status"]

    def spec(self, key):
        return self.api.get(*key)["spec"]

    def test_a_release_comes_changes_goes_back_and_goes(self):
        values = chart.merged(chart.values_of("tensor-2x8"), {"model": {"cache": {"type": "persistentVolumeClaim"}}})
        self.assertEqual(self.install(values), "deployed")
        before = {key: self.spec(key)["template"] for key in (COORDINATOR, WORKER)}
        broken = {"image": {"tag": "broken"}, "coordinator": {"config": {"policy": "tensor=4,replicas=2"}}, "worker": {"config": {"memory": "1GiB"}}}
        self.assertEqual(self.upgrade(chart.merged(values, broken)), "deployed")
        for key, template in before.items():
            self.assertNotEqual(self.spec(key)["template"], template)
        self.helm.rollback("lockstep")
        # Image, variables and the whole of the settings are those of before.
        for key, template in before.items():
            self.assertEqual(self.spec(key)["template"], template)
        self.helm.uninstall("lockstep")
        self.assertEqual(list(self.api.objects), [("PersistentVolumeClaim", "lockstep-models")], "models outlive a release")

    def test_every_kind_that_the_examples_use_is_taken(self):
        for name in ("mixed-pools", "tls-existing-etcd"):
            self.assertEqual(self.install(chart.values_of(name)), "deployed", name)
            rendered = {key for key in chart.render(chart.values_of(name))[0] if key != ("Pod", "lockstep-generate")}
            self.assertEqual(set(self.api.objects), rendered)
            self.helm.uninstall("lockstep")

    def test_autoscaling_takes_over_what_runs(self):
        """A number of replicas that a manifest names no longer would become 1."""
        values = chart.merged(chart.values_of("tensor-2x8"), {"worker": {"replicas": 5}})
        self.install(values)
        scaled = {"autoscaling": {"enabled": True, "kind": "hpa", "minReplicas": 2, "maxReplicas": 9}}
        grown = chart.merged(values, {"coordinator": {**scaled, "config": {"policy": "tensor=8"}}, "worker": scaled})
        self.upgrade(grown)
        self.assertEqual((self.spec(COORDINATOR)["replicas"], self.spec(WORKER)["replicas"]), (3, 5))
        # As the scaler then decides.
        self.api.get(*WORKER)["spec"]["replicas"] = 7
        self.upgrade(chart.merged(grown, {"image": {"tag": "next"}}))
        self.assertEqual(self.spec(WORKER)["replicas"], 7)

    def test_members_of_etcd_are_not_cut_off_from_each_other(self):
        """Their peers' URLs stand in etcd's data."""
        values = chart.merged(chart.LEAST, {"insecure": True, "etcd": {"mode": "bundled"}})
        self.assertEqual(self.install(values), "deployed")
        with self.assertRaises(helm.HelmError) as raised:
            self.upgrade(chart.merged(values, {"tls": {"cluster": {"mode": "certManager"}}}))
        self.assertIn("know each other by http://", str(raised.exception))
        self.assertEqual(self.upgrade(chart.merged(values, {"etcd": {"bundled": {"replicas": 5}}})), "deployed")

    def test_what_is_fixed_is_refused_by_the_server(self):
        values = chart.merged(chart.values_of("mixed-pools"), {})
        self.install(values)
        with self.assertRaises(helm.HelmError) as raised:
            self.upgrade(chart.merged(values, {"model": {"cache": {"size": "99Gi"}}}))
        self.assertIn("fixed", str(raised.exception))


if __name__ == "__main__":
    unittest.main()
