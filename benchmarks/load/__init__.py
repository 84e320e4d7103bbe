"""The load generator: workloads as data, a light HTTP client, the arithmetic of the results."""
