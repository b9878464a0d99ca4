"""Building blocks that several model families share."""
