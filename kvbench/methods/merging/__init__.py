"""Merging on eviction: evicted slots merge into the kept slots with the most similar keys, or into the next ones."""
