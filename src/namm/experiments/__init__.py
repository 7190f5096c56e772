"""Experiments: which of the package's parts, with which numbers, in which order."""
