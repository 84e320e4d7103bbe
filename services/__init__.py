"""Processes: sockets, event loops, signals, clocks, metrics, HTTP. Decides nothing: a decision is engine_core's."""
