"""LU-KV: shares of heads by the utility of the tokens that another method's scores discard."""
