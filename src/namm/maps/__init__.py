"""Mirror maps: g (`ICNN`), f (`RuleNet`, or the paper's `ResNet`), the pair (`MirrorMap`), and `IdentityMap`."""

from namm.maps.icnn import ICNN
from namm.maps.mirror import IdentityMap, Mirror, MirrorMap
from namm.maps.resnet import ResNet
from namm.maps.rulenet import RuleNet

__all__ = ["ICNN", "IdentityMap", "Mirror", "MirrorMap", "ResNet", "RuleNet"]
