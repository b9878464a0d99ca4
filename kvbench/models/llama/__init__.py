"""Llama-style decoders: language models whose shape is read from their own `config.json`."""
