"""The gRPC API: pagestream.v1.Inference, health and reflection."""
