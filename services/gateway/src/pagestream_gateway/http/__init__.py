"""The HTTP server: connections, bodies, origins, health, and the OpenAPI document."""
