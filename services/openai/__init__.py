"""OpenAI's, Anthropic's and Cohere's APIs: schemas, validation, endpoints."""
