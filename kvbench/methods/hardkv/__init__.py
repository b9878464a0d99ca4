"""Hard-KV: selection by probability mass, calibrated so that any score can be used."""
