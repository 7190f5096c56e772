"""The authors' checkpoints, written by flax, as networks of this package.

`msgpack_file` reads a file into nested maps of arrays, `networks` converts the arrays of one network, and `checkpoint`
puts the two together.
"""

from namm.import_flax.checkpoint import OfficialState, official_map, official_network, read_official, save_official

__all__ = ["OfficialState", "official_map", "official_network", "read_official", "save_official"]
