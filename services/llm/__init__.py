"""The Python API: an engine of processes that follows the program that started it, and the classes that speak to it."""
