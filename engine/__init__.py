"""Treadle's public API."""
