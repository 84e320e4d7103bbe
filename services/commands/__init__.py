"""What the command line does beside serving. Each module has `add_arguments` and `run`; services/cli.py calls them."""
