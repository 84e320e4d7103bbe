"""The Python API: `LLM`, `AsyncLLM`, and the engine of processes behind them."""
