"""Papers' published tables and figures beside measured ones."""
