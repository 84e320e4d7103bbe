"""Paged KV on the host: which blocks exist, who holds them, what they contain. No torch."""
