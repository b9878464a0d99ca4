"""Recorded work: CUDA graphs, copies from the host inside them, and the repetition of both."""
