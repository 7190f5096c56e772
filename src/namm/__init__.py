"""Generative models that obey a rule."""

from namm._version import __version__

__all__ = ["__version__"]
