"""Number formats of fewer than 16 bits, the planes that hold them, and codebooks."""
