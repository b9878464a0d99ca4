"""Weight files: their location, download, conversion and contents."""
