"""Choice of a method by a race on few samples."""
