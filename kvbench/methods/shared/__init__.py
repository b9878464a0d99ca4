"""Base classes and functions that every method may use."""
