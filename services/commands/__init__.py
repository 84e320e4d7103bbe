"""The commands other than serving. services/cli.py calls `add_arguments` and `command` of each."""
