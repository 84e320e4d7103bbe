"""OpenAI's Responses API: create, stream, retrieve, list the input, cancel, delete."""
