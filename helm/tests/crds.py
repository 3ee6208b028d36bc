"""What the chart may say in resources that other operators define.

kubernetes-validate knows Kubernetes' own kinds only. These are the fields that the chart uses of the others, by the
operators' own definitions; a field that is not here, or of another type, is refused.
"""

import jsonschema

TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 1}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required=(), **properties):
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def items(item):
    return {"type": "array", "minItems": 1, "items": item}


SELECTOR = fields(["matchLabels"], matchLabels=LABELS)
SECRET_KEY = fields(["secret"], secret=fields(["name", "key"], name=TEXT, key=TEXT))
ISSUER = fields(["name", "kind", "group"], name=TEXT, kind=TEXT, group=TEXT)
PATH = fields(["type", "value"], type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value=TEXT)
ROUTE_RULE = fields(
    ["backendRefs"], backendRefs=items(fields(["name", "port"], name=TEXT, port=COUNT)), matches=items(fields(["path"], path=PATH))
)
ROUTE = fields(
    ["parentRefs", "hostnames", "rules"],
    parentRefs=items(fields(["name"], name=TEXT, namespace=TEXT, sectionName=TEXT, port=COUNT)),
    hostnames=items(TEXT),
    rules=items(ROUTE_RULE),
)
RULE = fields(
    ["expr"], alert=TEXT, record=TEXT, expr=TEXT, labels=LABELS, annotations=LABELS, **{"for": {"pattern": r"^\d+[smh]$"}}
)

SPECS = {
    "monitoring.coreos.com/v1/ServiceMonitor": fields(
        ["selector", "endpoints"],
        selector=SELECTOR,
        endpoints=items(
            fields(
                ["port", "path"],
                port=TEXT,
                path=TEXT,
                interval={"pattern": r"^\d+[sm]$"},
                relabelings=items(fields(["targetLabel", "replacement"], targetLabel=TEXT, replacement=TEXT)),
                scheme={"enum": ["http", "https"]},
                tlsConfig=fields(
                    ["serverName"],
                    ca=SECRET_KEY,
                    cert=SECRET_KEY,
                    keySecret=fields(["name", "key"], name=TEXT, key=TEXT),
                    serverName=TEXT,
                ),
            )
        ),
    ),
    "monitoring.coreos.com/v1/PrometheusRule": fields(
        ["groups"], groups=items(fields(["name", "rules"], name=TEXT, rules=items(RULE)))
    ),
    "keda.sh/v1alpha1/ScaledObject": fields(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=fields(["name"], apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        advanced=fields(horizontalPodAutoscalerConfig=fields(behavior={"type": "object"})),
        triggers=items(fields(["type", "metadata"], type={"const": "prometheus"}, metadata=LABELS)),
    ),
    "cert-manager.io/v1/Issuer": {
        "oneOf": [
            fields(["selfSigned"], selfSigned=fields()),
            fields(["ca"], ca=fields(["secretName"], secretName=TEXT)),
        ]
    },
    "cert-manager.io/v1/Certificate": fields(
        ["secretName", "issuerRef"],
        secretName=TEXT,
        issuerRef=ISSUER,
        isCA={"type": "boolean"},
        commonName=TEXT,
        dnsNames=items(TEXT),
        usages=items({"enum": ["digital signature", "server auth", "client auth"]}),
        duration={"pattern": r"^\d+h$"},
        renewBefore={"pattern": r"^\d+h$"},
        privateKey=fields(algorithm={"const": "ECDSA"}, size={"const": 256}, rotationPolicy={"const": "Always"}),
    ),
    "gateway.networking.k8s.io/v1/HTTPRoute": ROUTE,
    "gateway.networking.k8s.io/v1/GRPCRoute": ROUTE,
}


def is_known(manifest):
    return f"{manifest['apiVersion']}/{manifest['kind']}" in SPECS


def check(manifest):
    schema = SPECS[f"{manifest['apiVersion']}/{manifest['kind']}"]
    jsonschema.validate(manifest["spec"], schema)
