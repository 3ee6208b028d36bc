"""An API server in small: what Helm itself talks to when it installs, upgrades and rolls back.

For test_release.py. It holds objects, checks them against Kubernetes' schemas (those of operators against crds.py), refuses
changes of what is fixed, and applies on the server's side: what the applier no longer names goes, what others set stays.
Not here: controllers, defaults but that of `replicas`, versions but the one of each kind that the chart uses.
"""

import copy
import http.server
import json
import threading

import jsonschema

import chart

VERSION = "1.31"
# Group and version → kinds; those without a namespace are in CLUSTER.
KINDS = {
    "v1": ["ServiceAccount", "ConfigMap", "Service", "Secret", "PersistentVolumeClaim", "Pod"],
    "apps/v1": ["Deployment", "StatefulSet"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy", "Ingress"],
    "autoscaling/v2": ["HorizontalPodAutoscaler"],
    "scheduling.k8s.io/v1": ["PriorityClass"],
    "monitoring.coreos.com/v1": ["ServiceMonitor", "PrometheusRule"],
    "keda.sh/v1alpha1": ["ScaledObject"],
    "cert-manager.io/v1": ["Issuer", "Certificate"],
    "gateway.networking.k8s.io/v1": ["HTTPRoute", "GRPCRoute"],
}
CLUSTER = {"PriorityClass"}
# Fields of a StatefulSet that may change; all others make the API server refuse an update.
MUTABLE = {"replicas", "ordinals", "template", "updateStrategy", "persistentVolumeClaimRetentionPolicy", "minReadySeconds"}


def plural(kind):
    kind = kind.lower()
    return kind[:-1] + "ies" if kind.endswith("cy") else kind + ("es" if kind.endswith("ss") else "s")


def fixed(manifest):
    """What of an object cannot be another one later."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "StatefulSet":
        return {key: value for key, value in spec.items() if key not in MUTABLE}
    if kind == "Deployment":
        return spec["selector"]
    if kind == "Service":
        return spec.get("clusterIP")
    if kind == "PersistentVolumeClaim":
        return spec
    return (manifest["value"], manifest["preemptionPolicy"]) if kind == "PriorityClass" else None


def applied(held, before, after):
    """An object after `after` was applied in place of `before`."""
    if not (isinstance(held, dict) and isinstance(after, dict)):
        return copy.deepcopy(after)
    before = before if isinstance(before, dict) else {}
    kept = {key: value for key, value in held.items() if key in after or key not in before}
    return {**kept, **{key: applied(kept.get(key), before.get(key), value) for key, value in after.items()}}


class Refused(Exception):
    def __init__(self, code, reason, message):
        super().__init__(message)
        self.status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}


class ApiServer:
    def __init__(self):
        self.objects, self.applied, self.writes = {}, {}, []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Header and body in one segment: the second would wait for the first one to be acknowledged.
            wbufsize = -1

            def answer(self):
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                try:
                    code, content = 200, server.serve(self.command, self.path.split("?")[0], body)
                except Refused as refused:
                    code, content = refused.status["code"], refused.status
                text = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = answer

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def get(self, kind, name):
        return self.objects.get((kind, name))

    def serve(self, method, path, body):
        if path == "/version":
            return {"major": "1", "minor": VERSION.split(".")[1], "gitVersion": f"v{VERSION}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [self.group(known) for known in KINDS if "/" in known]}
        if path.startswith("/openapi/v3"):
            return self.openapi(path.removeprefix("/openapi/v3").strip("/"))
        parts = path.strip("/").split("/")
        known = "/".join(parts[1 : 2 if parts[0] == "api" else 3])
        if known not in KINDS:
            raise Refused(404, "NotFound", path)
        rest = parts[2 if parts[0] == "api" else 3 :]
        if not rest:
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": known, "resources": self.resources(known)}
        rest = rest[2:] if rest[0] == "namespaces" else rest
        kind = next((kind for kind in KINDS[known] if plural(kind) == rest[0]), None)
        if kind is None:
            raise Refused(404, "NotFound", path)
        return self.on_object(method, known, kind, rest[1] if len(rest) > 1 else None, body)

    def openapi(self, place):
        """Says of every kind that this server looks at unknown fields itself, which is all that Helm asks."""
        places = {f"{'apis' if '/' in known else 'api'}/{known}": known for known in KINDS}
        if not place:
            return {"paths": {place: {"serverRelativeURL": f"/openapi/v3/{place}"} for place in places}}
        *group, version = places[place].split("/")
        paths = {}
        for kind in KINDS[places[place]]:
            named = {"group": "".join(group), "version": version, "kind": kind}
            looks = {"name": "fieldValidation", "in": "query"}
            paths[f"/{place}/{plural(kind)}"] = {"patch": {"parameters": [looks], "responses": {}, "x-kubernetes-group-version-kind": named}}
        return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": VERSION}, "paths": paths}

    def group(self, known):
        name, version = known.split("/")
        versions = {"groupVersion": known, "version": version}
        return {"name": name, "versions": [versions], "preferredVersion": versions}

    def resources(self, known):
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        row = lambda kind: {"name": plural(kind), "singularName": kind.lower(), "namespaced": kind not in CLUSTER, "kind": kind, "verbs": verbs}
        return [row(kind) for kind in KINDS[known]]

    def on_object(self, method, known, kind, name, body):
        held = self.objects.get((kind, name))
        if method == "GET" and name is None:
            return {"kind": f"{kind}List", "apiVersion": known, "items": [o for (k, _), o in self.objects.items() if k == kind]}
        if method in ("GET", "DELETE"):
            if held is None:
                raise Refused(404, "NotFound", f"{plural(kind)} {name!r} not found")
            return held if method == "GET" else self.objects.pop((kind, name))
        # Applied on the server's side, or created: both are the whole of what the writer wants.
        wanted = json.loads(body)
        name = wanted["metadata"]["name"]
        wanted["metadata"].pop("creationTimestamp", None)
        wanted.pop("status", None)
        try:
            chart.check_any(wanted, [VERSION])
        except (AssertionError, jsonschema.ValidationError) as error:
            raise Refused(422, "Invalid", str(error)) from error
        held = self.objects.get((kind, name))
        result = applied(held, self.applied.get((kind, name)), wanted) if held else wanted
        if held and fixed(held) != fixed(result):
            raise Refused(422, "Invalid", f"{kind} {name}: spec: updates to fields that are fixed are forbidden")
        if kind in chart.WORKLOADS:
            result["spec"].setdefault("replicas", 1)
        self.applied[kind, name] = wanted
        self.objects[kind, name] = {**result, "metadata": {**result["metadata"], "resourceVersion": str(len(self.writes) + 1), "uid": f"{kind}-{name}"}}
        self.writes.append((method, kind, name))
        return self.objects[kind, name]
