"""Results as data: a row per run or per sample, as frames and as files."""
