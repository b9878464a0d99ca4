"""Cache backend that stores keys and values in fewer than 16 bits."""
