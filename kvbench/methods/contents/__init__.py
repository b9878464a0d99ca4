"""Scores of slots by their contents: norms and leverage of keys and values, and attention without a mask."""
