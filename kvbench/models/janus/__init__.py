"""Janus-Pro: text and image tokens in one language model (arXiv:2501.17811); only text to image."""
