"""Training of the embedded class-conditional model `var_tiny`: tokenizer and transformer."""
