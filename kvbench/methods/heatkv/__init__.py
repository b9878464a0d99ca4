"""HeatKV: calibrated scores, eviction schedules and order files."""
