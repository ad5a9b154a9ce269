"""Keys and values of a layer written one after the other, so that only one of them is there in float32 at a time."""

import math

import torch
from torch import Tensor

from diffkv_repro.core.quantize import LARGEST
from diffkv_repro.kvserve.assets import Place
from diffkv_repro.kvserve.layout import LayerKV
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.streams import StreamWriter
from diffkv_repro.kvserve.transforms import power_of


def in_turn(profile: Profile) -> bool:
    """Whether a profile's transforms and quantizer take keys and values each by themselves."""
    return bool(profile.transforms) and profile.quantizer.in_turn and all(own.by_part for own in profile.transforms)


def write_in_turn(profile: Profile, layer: LayerKV, place: Place, streams: StreamWriter) -> None:
    """Write a layer of a profile that goes :func:`in_turn`: the bytes of a layer that is transformed whole."""

    def turned(part: int) -> Tensor:
        found = (layer.key, layer.value)[part]
        for transform in profile.transforms:
            found = transform.forward_part(found, part, place)
        return found

    # Both powers come before the keys: values that a transform cannot bring beyond FP16 need not be tried.
    growth = math.prod(transform.growth(place) for transform in profile.transforms)
    power = 0 if _most(layer.value) * growth <= LARGEST else power_of(turned(1))
    key = turned(0)
    powers = [power_of(key), power]
    streams.meta(torch.tensor(powers, dtype=torch.uint8))
    profile.quantizer.encode_part(times(key, -powers[0]), 0, place, streams)
    del key
    profile.quantizer.encode_part(times(turned(1), -power), 1, place, streams)


def _most(tensor: Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    low, high = torch.aminmax(tensor) if tensor.numel() else (tensor.new_zeros(()), tensor.new_zeros(()))
    return max(-low.item(), high.item())


def times(tensor: Tensor, power: int) -> Tensor:
    """``tensor`` times a power of two, as it is for 2**0."""
    return torch.ldexp(tensor.float(), torch.tensor(power)) if power else tensor
