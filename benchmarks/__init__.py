"""Benchmarks of the engine and its kernels: `python -m benchmarks <name>`."""
