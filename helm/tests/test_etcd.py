"""The chart's etcd over its life: founded, a member whose disk is lost, and more members than before.

Its command lines run as processes, with etcd itself.
"""

import subprocess
import time
import unittest

import chart
from kubelet import Node

NAME = "lockstep-etcd"


def rendered(replicas):
    values = chart.merged(chart.LEAST, {"etcd": {"mode": "bundled", "bundled": {"replicas": replicas}}})
    return {key: manifest for key, manifest in chart.render(values)[0].items() if key[1] == NAME}


class Membership(unittest.TestCase):
    def control(self, pod, *arguments):
        """etcdctl at one member."""
        command = ["etcdctl", f"--endpoints=http://{pod.address}:2379", *arguments]
        ran = subprocess.run(command, env={"ETCDCTL_API": "3", "PATH": "/usr/bin"}, capture_output=True, text=True, timeout=20)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return ran.stdout

    def check(self, node, replicas):
        """All members run, under the names of their pods, and each has what was written."""
        members = [line.split(", ") for line in self.control(node.pods[f"{NAME}-0"], "member", "list").splitlines()]
        self.assertEqual(sorted(member[2] for member in members), [f"{NAME}-{index}" for index in range(replicas)])
        self.assertEqual({member[1] for member in members}, {"started"})
        for pod in node.pods.values():
            self.assertEqual(self.control(pod, "get", "--consistency=s", "--print-value-only", "key"), "value\n", pod.name)

    def test_members_are_added_and_a_lost_disk_is_made_good(self):
        with Node(rendered(1)) as node:
            node.start()
            node.wait_ready()
            self.control(node.pods[f"{NAME}-0"], "put", "key", "value")
            node.roll(rendered(3), "StatefulSet", NAME)
            self.check(node, 3)
            # Without a leader nobody is admitted, and nobody founds another cluster either. With one etcd still admits nobody
            # within five seconds of a change, which etcd-member waits for.
            node.pods[f"{NAME}-2"].terminate()
            node.replace(NAME, 1, is_volume_lost=True, waits=False)
            time.sleep(3)
            self.assertIsNone(node.pods[f"{NAME}-1"].process, "etcd was started")
            node.replace(NAME, 2)
            node.wait_ready()
            self.check(node, 3)

    def test_a_second_cluster_is_never_founded(self):
        with Node(rendered(3)) as node:
            node.start()
            node.wait_ready()
            self.control(node.pods[f"{NAME}-0"], "put", "key", "value")
            self.check(node, 3)
            for pod in node.pods.values():
                pod.terminate()
            # A majority without data might found one, were it not for the third, which has not said that it has none.
            for index in (1, 2):
                node.replace(NAME, index, is_volume_lost=True, waits=False)
            time.sleep(5)
            node.replace(NAME, 0, waits=False)
            time.sleep(5)
            for index in (1, 2):
                self.assertIsNone(node.pods[f"{NAME}-{index}"].process, "etcd was started")


if __name__ == "__main__":
    unittest.main()
