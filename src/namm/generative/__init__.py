"""Generative models for mirror space: the score network `NCSNpp`."""

from namm.generative.ncsnpp import NCSNpp

__all__ = ["NCSNpp"]
