"""OpenTelemetry for Pagestream's processes."""
