"""Figures of finished runs."""
