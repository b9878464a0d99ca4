"""Tables and figures of finished runs, and comparisons with published numbers."""
