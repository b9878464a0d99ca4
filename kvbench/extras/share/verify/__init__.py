"""Verification of recorded runs by drawing some of their samples again."""
