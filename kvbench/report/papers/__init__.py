"""Published tables and figures of papers, compared with measured ones."""
