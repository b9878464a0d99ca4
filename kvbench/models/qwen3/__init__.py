"""Qwen3: language models whose output is text."""
