"""Which profiles an inference engine of others can use."""

import torch

from diffkv_repro.core.errors import first_line
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.codecs import CodecUnavailable
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.layout import KVLayout, LayerKV
from diffkv_repro.kvserve.profile import Profile

_TRIED = 96  # tokens


def lossless(profile: Profile) -> bool:
    """Whether a cache comes back as it was, to the bit."""
    return profile.quantizer.exact and not profile.transforms


def try_out(profile: Profile, layout: KVLayout, assets: Assets) -> None:
    """Encode and decode a little, which also compiles what is compiled at first use. Raises ValueError for a profile
    that needs what is not here, or drops tokens, which an engine's attention would not know."""
    random = torch.Generator().manual_seed(0)
    shape = (layout.kv_heads, _TRIED, layout.head_dim)
    layers = [LayerKV(*(torch.randn(shape, generator=random).to(layout.dtype) for _ in "kv"))] * layout.layers
    try:
        pieces = b"".join(profile.stream(layers, layout, _TRIED, assets=assets))
        dropped = any(layer.kept is not None for layer in Frame.from_bytes(pieces, layout).layers())
    except (ValueError, CodecUnavailable) as error:
        raise ValueError(f"profile {profile} cannot be used in an engine: {first_line(error)}") from error
    if dropped or any(levels[0] == 0 for levels in getattr(profile.quantizer, "steps", ())):
        raise ValueError(f"profile {profile} drops tokens, and an engine's attention would not know which")
