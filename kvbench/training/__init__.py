"""Training of the embedded model `infinity_tiny`: tokenizer, transformer and feature network."""
