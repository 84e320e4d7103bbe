"""Paged KV on the host: which blocks exist, which sequences hold them, what they contain. No torch."""
