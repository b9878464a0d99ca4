"""Parts of the documentation that come from `conf/`, docstrings and measured tables."""
