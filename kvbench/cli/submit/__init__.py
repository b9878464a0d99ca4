"""Start of a sweep's workers on Slurm, Ray or in the background, and its summary."""
