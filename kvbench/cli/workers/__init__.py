"""Workers of a sweep: claims, log, status, control."""
