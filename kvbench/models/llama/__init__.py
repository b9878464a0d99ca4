"""Decoders of the Llama kind, language models whose shape is read from their own `config.json`."""
