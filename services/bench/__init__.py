"""Measuring a server, the Python API and a start: what `penstock bench` runs and benchmarks/ is made with."""
