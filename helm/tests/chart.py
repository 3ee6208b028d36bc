"""The chart as Helm's own engine renders it, and what the tests know about manifests.

For the tests beside this file. Nothing here judges: that is in test_*.py.
"""

import pathlib

import helm_python as helm
import kubernetes_validate
import yaml

import crds

CHART = pathlib.Path(__file__).parents[1]
REPOSITORY = CHART.parent
GOLDEN = CHART / "tests/golden"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
WORKLOADS = ("Deployment", "StatefulSet")
LOADED = helm.Chart.load(str(CHART))
# Smallest values that render.
LEAST = {"insecure": True, "model": {"uri": "https://host/model.gguf"}}


def values_of(example):
    return helm.values_from_yaml(EXAMPLES[example].read_text())


def merged(values, change):
    """Values with others over them, as several -f do."""
    result = dict(values)
    for key, value in change.items():
        is_nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if is_nested else value
    return result


def render(values, chart=None, release="lockstep"):
    """Manifests by (kind, name), and the text of NOTES.txt."""
    chart = chart or LOADED
    chart.validate_schema(values)
    manifests, notes = {}, ""
    for path, text in sorted(chart.render(values, name=release, namespace="serving", is_install=True).items()):
        if path.endswith("NOTES.txt"):
            notes = text
            continue
        for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader):
            if manifest:
                key = (manifest["kind"], manifest["metadata"]["name"])
                assert key not in manifests, f"{key} is there twice"
                manifests[key] = manifest
    return manifests, notes


def of_kind(manifests, *kinds):
    return [manifest for (kind, _), manifest in manifests.items() if kind in kinds]


def pods(manifests):
    """(name of the workload, pod spec) of all that makes pods."""
    for manifest in of_kind(manifests, *WORKLOADS):
        yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]
    for manifest in of_kind(manifests, "Pod"):
        yield manifest["metadata"]["name"], manifest["spec"]


def containers(pod):
    return pod.get("initContainers", []) + pod["containers"]


def check_any(manifest, versions):
    """Refuses a manifest that Kubernetes of one of these versions would, or the operator whose kind it is."""
    if crds.is_known(manifest):
        crds.check(manifest)
        return
    for version in versions:
        check_schema(manifest, version)


def check_schema(manifest, version):
    """Refuses a manifest that Kubernetes of this version would; unknown fields too."""
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.path)
        raise AssertionError(f"{manifest['kind']} {manifest['metadata']['name']}: {where}: {error.message}") from None
