"""Processes: sockets, event loops, signals, clocks, metrics and HTTP. Decides nothing; a decision is a call into engine_core."""
