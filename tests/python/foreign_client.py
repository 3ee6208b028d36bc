"""A gRPC client that has no stubs of ours: it learns the services by reflection. Prints what it saw as JSON.

usage: foreign_client.py HOST:PORT
"""

import json
import sys

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

channel = grpc.insecure_channel(sys.argv[1])
reflection = ProtoReflectionDescriptorDatabase(channel)
pool = DescriptorPool(reflection)
service = pool.FindServiceByName("lockstep.v1.Inference")
method = service.FindMethodByName("Generate")
Request = message_factory.GetMessageClass(method.input_type)
Response = message_factory.GetMessageClass(method.output_type)
generate = channel.unary_stream(
    f"/{service.full_name}/{method.name}",
    request_serializer=Request.SerializeToString,
    response_deserializer=Response.FromString,
)

report = {"services": sorted(reflection.get_services()), "text": ""}
health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service.full_name), timeout=10)
report["health"] = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)

sampling = {"maxTokens": 8, "temperature": 0, "ignoreEos": True}
request = json_format.ParseDict({"prompt": "The capital of France is", "sampling": sampling}, Request())
for response in generate(request, timeout=60):
    message = json_format.MessageToDict(response)
    report["text"] += message.get("delta", {}).get("text", "")
    report["finish"] = message.get("finish")

try:
    list(generate(json_format.ParseDict({"prompt": "", "sampling": sampling}, Request()), timeout=60))
except grpc.RpcError as error:
    report["refused"] = error.code().name
    report["reason"] = dict(error.initial_metadata() or ()).get("lockstep-reason") or dict(
        error.trailing_metadata() or ()
    ).get("lockstep-reason")

print(json.dumps(report))
