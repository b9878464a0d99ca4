"""Worlds of the embedded image models: coloured shapes with captions and a detector, and names of pictures."""
