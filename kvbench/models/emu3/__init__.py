"""Emu3-Gen: words and image codes in one vocabulary (arXiv:2409.18869); only text to image."""
