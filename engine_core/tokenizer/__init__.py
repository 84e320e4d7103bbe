"""The tokenizer of a model: text to token ids and back."""
