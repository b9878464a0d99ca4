"""Training of the embedded next-token model `llamagen_tiny`: tokenizer, and transformer with its text encoder."""
