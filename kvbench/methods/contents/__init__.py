"""Scores of slots by their contents: norms and shapes of keys and values, and attention without a mask."""
