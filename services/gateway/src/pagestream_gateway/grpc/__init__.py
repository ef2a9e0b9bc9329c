"""The gRPC API."""

from pagestream_gateway.grpc.server import GrpcServer

__all__ = ["GrpcServer"]
