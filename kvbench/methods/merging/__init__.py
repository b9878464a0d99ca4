"""Merging on eviction: evicted slots merge into kept slots with the most similar keys, or into the next kept slots."""
