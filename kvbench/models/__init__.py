"""Models for inference; every self-attention layer calls `cache.attend`."""
