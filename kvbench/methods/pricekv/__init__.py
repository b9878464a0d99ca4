"""PriceKV: KV budgets allocated by Lagrange multipliers, from calibrated errors of attention's output."""
