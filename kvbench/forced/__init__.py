"""Forced decoding: a text's parts, the passes over its tokens, and the record of both caches' predictions."""
