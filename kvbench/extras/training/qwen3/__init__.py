"""Training of the small language model, whose class is Qwen3's."""
