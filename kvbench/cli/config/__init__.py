"""Configuration of a command: composed, searched, checked, instantiated."""
