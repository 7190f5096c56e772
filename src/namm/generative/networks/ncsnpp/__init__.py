"""NCSN++, the score network of the paper: `network.NCSNpp`."""
