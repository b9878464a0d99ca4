"""Sweeps on disk: jobs, progress, launchers."""
