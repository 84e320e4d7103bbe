"""Processes: starting, watching and restarting them, and their common setup."""
