"""Merging on eviction: evicted slots merge into the most similar slot that stays, or into its neighbours."""
