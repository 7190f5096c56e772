"""Figures and, later, reports, made from stored results."""
