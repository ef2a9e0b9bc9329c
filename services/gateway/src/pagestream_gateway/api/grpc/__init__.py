"""The gRPC API."""

from pagestream_gateway.api.grpc.server import GrpcServer

__all__ = ["GrpcServer"]
