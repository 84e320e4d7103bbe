"""The api process: HTTP in OpenAI's shapes, validation, admission and the client's connection."""
