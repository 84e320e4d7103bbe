"""What the command line does beside serving. services/cli.py calls `add_arguments` and `command` of each."""
