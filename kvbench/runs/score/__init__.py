"""Metrics of a finished run, its contact sheet and its loggers."""
