"""Profiles of other programs, read into this project's own types. Needs no torch."""
