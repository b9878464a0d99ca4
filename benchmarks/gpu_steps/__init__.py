"""Steps of `python -m benchmarks gpu_check`, one module each, listed there."""
