"""Training of the embedded models and of the feature network, with one package per family."""
