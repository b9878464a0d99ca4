"""Puzzles of three walkers in a house: long chains of moves with look-ups of distant tokens."""
