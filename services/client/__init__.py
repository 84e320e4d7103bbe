"""The engine's client, shared by the api process and the Python API."""
