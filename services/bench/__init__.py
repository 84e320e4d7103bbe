"""`penstock bench`: the load generator, the Python API under load, and start times."""
