"""Sweeps on disk: their jobs, progress and launchers."""
