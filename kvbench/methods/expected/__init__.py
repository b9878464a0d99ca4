"""Expected attention: scores by the attention expected from Gaussian queries."""
