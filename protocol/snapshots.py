"""What processes of other hosts tell of their metrics."""

from __future__ import annotations

from penstock.protocol.message import Message


class MetricsSnapshots(Message, frozen=True):
    """executor → scheduler → tokenizer → api, once a second between hosts: services/metrics/snapshot.py reads it."""

    snapshots: bytes
