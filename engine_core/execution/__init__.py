"""Execution: slots, steps and results on one device."""
