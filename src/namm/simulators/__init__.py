"""Discretised physics and random fields: each operator in exactly one place."""
