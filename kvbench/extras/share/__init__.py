"""Published datasets of runs, and verification of recorded runs."""
