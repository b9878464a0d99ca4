"""Start of a sweep's workers on Slurm, on Ray or in the background; summary of the sweep."""
