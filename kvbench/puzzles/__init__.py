"""Puzzles of three walkers in a house: long chains of moves that look up distant tokens."""
