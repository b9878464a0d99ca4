"""Three walkers in a house: problems whose answer wants a long chain of moves, each of them looked up far back."""
