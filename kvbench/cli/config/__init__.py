"""Configuration of a command: composition, search path, checks and objects."""
