"""The tokenizer process: chat templates, text to tokens, tokens to text, stop strings."""
