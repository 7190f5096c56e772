"""Mirror maps: g (`ICNN`), f (`ResNet`), the pair (`MirrorMap`) and the trivial pair (`IdentityMap`)."""

from namm.maps.icnn import ICNN
from namm.maps.mirror import IdentityMap, Mirror, MirrorMap
from namm.maps.resnet import ResNet

__all__ = ["ICNN", "IdentityMap", "Mirror", "MirrorMap", "ResNet"]
