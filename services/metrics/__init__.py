"""Metrics of every process, and /metrics."""
