"""Training of the embedded next-scale models of captions: tokenizer, and transformer with its text encoder."""
