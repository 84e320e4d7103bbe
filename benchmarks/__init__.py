"""Measures Penstock and records the figures; the product never imports it."""
