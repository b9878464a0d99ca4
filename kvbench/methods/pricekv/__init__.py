"""PriceKV: attention's output error for every set of past sources, and lifetimes of blocks bought at prices."""
