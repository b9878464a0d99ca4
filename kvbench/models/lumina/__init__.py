"""Lumina-mGPT: Chameleon's language model, trained to generate images (arXiv:2408.02657); only text to image."""
