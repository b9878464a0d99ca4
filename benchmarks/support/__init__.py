"""Modules that the benchmarks share: configuration without Hydra, timing, tables, models to compare with."""
