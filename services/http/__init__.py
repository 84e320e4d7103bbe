"""The HTTP server of the api process: connections, parsing, middleware, limits. Knows no API."""
