"""Tasks of the command line."""
