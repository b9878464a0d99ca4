"""Rankings of the runs in several people's published datasets."""
