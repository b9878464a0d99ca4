"""Forced decoding: a text's parts, the passes over its tokens, and their record beside the full cache's."""
