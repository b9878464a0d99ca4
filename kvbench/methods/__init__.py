"""Compression methods, one file each; `conf/method/*.yaml` is their registry."""
