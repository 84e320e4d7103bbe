"""The recipe of the embedded demo model: generator, tokenizer, training, evaluation. Run from the repository root."""
