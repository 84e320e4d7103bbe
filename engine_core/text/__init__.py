"""Text to tokens and back: vocabulary, chat template, detokenizer, stop strings, and the frontend that joins them."""
