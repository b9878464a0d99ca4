"""Expected attention: what a Gaussian of queries would attend to."""
