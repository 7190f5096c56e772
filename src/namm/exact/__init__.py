"""Exactness: the nearest image that obeys a rule, and a certificate of how far images are from it."""

from namm.exact.certificate import Certificate, certify
from namm.exact.polish import Polished, polish

__all__ = ["Certificate", "Polished", "certify", "polish"]
