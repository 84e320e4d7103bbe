"""Model families over shared layers, and the spec that config.json becomes."""
