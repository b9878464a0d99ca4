"""Merging on eviction: what leaves goes into the most similar slot that stays, or into its neighbours."""
