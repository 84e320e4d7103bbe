"""OpenTelemetry traces of requests, steps and starts, exported by each process."""
