"""What the documentation shows of the program: its choices, docstrings and measured tables."""
