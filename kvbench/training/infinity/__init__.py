"""Training of the embedded next-scale model `infinity_tiny`: tokenizer, and transformer with its text encoder."""
