"""Generation of one run's samples, batch by batch."""
