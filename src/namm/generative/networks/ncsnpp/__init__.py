"""NCSN++, the score network of the paper."""

from namm.generative.networks.ncsnpp.network import NCSNpp

__all__ = ["NCSNpp"]
