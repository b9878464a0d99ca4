"""Finished runs as datasets for the Hugging Face Hub."""
