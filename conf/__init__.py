"""Hydra configuration: what can be chosen, no logic."""
