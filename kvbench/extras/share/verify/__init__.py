"""Verification of recorded runs by generating some of their samples again."""
