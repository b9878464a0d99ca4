"""Training of the embedded models and of the feature network: one folder per family, what they share beside them."""
