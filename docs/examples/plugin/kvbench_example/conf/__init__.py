"""Choices that this package adds to the configuration groups of kvbench."""
