"""Foundations of all rooms: shapes, budgets, settings, files, devices."""
