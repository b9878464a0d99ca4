"""Weight files: found, downloaded, converted, read."""
