"""Traces: what each process knows of a request, of a step or of its own start, told to an OpenTelemetry collector."""
