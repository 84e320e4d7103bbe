"""Processes: starting, watching and restarting them, and what each sets up before its own work."""
