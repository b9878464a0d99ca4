"""Forced decoding: a model reads given tokens, and its predictions are compared with the full cache's."""
