"""Extras: sharing of results, races among methods and training; nothing outside this package imports it."""
