"""Lumina-mGPT: Chameleon's language model, taught to draw (arXiv:2408.02657); only text to image."""
