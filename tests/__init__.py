"""Tests; a package, since a dependency installs one of the same name."""
