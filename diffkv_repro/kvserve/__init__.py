"""KVServe (SIGCOMM 2026): KV caches compressed for the network, with a profile chosen for each request.

A :class:`Profile` is transform, quantizer and codec; ``measure`` says what it costs and saves. The latency model says
what it takes at a bandwidth, the controller chooses by it and learns from what it observes, and the simulator replays
traces through controllers to compare them.
"""

from diffkv_repro.kvserve.assets import Assets, PromptScores
from diffkv_repro.kvserve.codecs import CODECS, CodecError, CodecUnavailable
from diffkv_repro.kvserve.diffkv_pages import TokenTiers, receive_pages, send_pages
from diffkv_repro.kvserve.frame import Frame, receive
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.heads import HeadScores, score_heads
from diffkv_repro.kvserve.latency import MeasuredProfile
from diffkv_repro.kvserve.layout import KV, KVLayout, LayerKV
from diffkv_repro.kvserve.measure import ProfileRun, measure, measure_all
from diffkv_repro.kvserve.named import NAMED, SPREAD
from diffkv_repro.kvserve.prefill import Prefilled, prefill
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quantizers import QUANTIZERS
from diffkv_repro.kvserve.space import SPACES, Space, space
from diffkv_repro.kvserve.transform_state import AffineMaps, RotaryKeys
from diffkv_repro.kvserve.transforms import TRANSFORMS

__all__ = [
    "CODECS",
    "KV",
    "NAMED",
    "QUANTIZERS",
    "SPACES",
    "SPREAD",
    "TRANSFORMS",
    "AffineMaps",
    "Assets",
    "CodecError",
    "CodecUnavailable",
    "Frame",
    "FrameError",
    "HeadScores",
    "KVLayout",
    "LayerKV",
    "MeasuredProfile",
    "Prefilled",
    "Profile",
    "ProfileRun",
    "PromptScores",
    "RotaryKeys",
    "Space",
    "TokenTiers",
    "measure",
    "measure_all",
    "prefill",
    "receive",
    "receive_pages",
    "score_heads",
    "send_pages",
    "space",
]  # fmt: skip
