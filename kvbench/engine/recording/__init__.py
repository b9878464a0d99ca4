"""Recorded work: CUDA graphs, copies from the host inside them, and their repetition."""
