"""Files of a run folder: samples, results, costs, provenance."""
