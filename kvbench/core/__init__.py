"""Foundations of all packages: shapes, budgets, settings, files, devices."""
