"""Worlds of embedded image models: coloured shapes with captions and a detector; names of pictures."""
