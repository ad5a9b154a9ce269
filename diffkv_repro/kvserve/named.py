"""The methods that KVServe recombines, and its own, as profiles (its Table 1)."""

from diffkv_repro.kvserve.cachegen import CacheGen
from diffkv_repro.kvserve.codecs import BitPack, NoCodec, Zstd
from diffkv_repro.kvserve.entropy import Ans, RangeCoding
from diffkv_repro.kvserve.grids import KEPT
from diffkv_repro.kvserve.kvquant import KVQuant
from diffkv_repro.kvserve.ladders import HeadLadder, MixHQ
from diffkv_repro.kvserve.nvcomp import NVCOMP
from diffkv_repro.kvserve.profile import NAMES, Profile
from diffkv_repro.kvserve.quantizers import Exact, Kivi, Uniform
from diffkv_repro.kvserve.token_ladder import TokenLadder
from diffkv_repro.kvserve.transforms import Hadamard, KeyBias, Unrope

_PRUNED = ((KEPT, KEPT), (0, 0))
_PER_HEAD = Uniform(16, 16, "token", "token", joint=False)
_NVCOMP = {codec.name: codec for codec in NVCOMP}

NAMED: dict[str, Profile] = {
    "none": Profile(),
    "lossless-zstd": Profile((), Exact(), Zstd(shuffle=True)),
    "lossless-ans": Profile((), Exact(), Ans(shuffle=True)),
    "int4": Profile((), _PER_HEAD, BitPack()),
    "quarot-4bit": Profile((Hadamard(),), _PER_HEAD, BitPack()),
    # Groups of 32 and 128 recent tokens: the settings of KIVI's LongBench runs. 2 bits is what KVServe's 5.33x shows.
    "kivi-2bit": Profile((), Kivi(2), BitPack()),
    "kivi-4bit": Profile((), Kivi(4), BitPack()),
    "cachegen-1": Profile((), CacheGen(1), RangeCoding(per="channel")),
    "cachegen-2": Profile((), CacheGen(2), RangeCoding(per="channel")),
    "cachegen-3": Profile((), CacheGen(3), RangeCoding(per="channel")),
    "cachegen-1-keybias": Profile((KeyBias(),), CacheGen(1), RangeCoding(per="channel")),
    "cachegen-2-keybias": Profile((KeyBias(),), CacheGen(2), RangeCoding(per="channel")),
    "kvquant-3bit": Profile((Unrope(),), KVQuant(8), BitPack()),
    "kvquant-4bit": Profile((Unrope(),), KVQuant(16), BitPack()),
    # KVServe's copy streams 80 % of the heads (its Figure 3 needs that share) with 128 first and 256 last tokens.
    "duoattention": Profile((), HeadLadder(_PRUNED, (0.2, 0.8), sink=128, recent=256), NoCodec()),
    "snapkv": Profile((), TokenLadder(_PRUNED, (0.5, 0.5), recent=32, budget=2048), NoCodec()),
    "pyramidkv": Profile((), TokenLadder(_PRUNED, (0.5, 0.5), recent=32, budget=2048, beta=20.0), NoCodec()),
    "kvserve-default": Profile((), MixHQ(), Ans()),
    "kvserve-hadamard": Profile((Hadamard(),), MixHQ(), Ans()),
    "kvserve-default-gpu": Profile((), MixHQ(), _NVCOMP["nvcomp-ans"]()),
    "kvserve-bitcomp-gpu": Profile((), MixHQ(), _NVCOMP["nvcomp-bitcomp"]()),
}
NAMES.update(NAMED)

SPREAD: dict[str, Profile] = {
    "256 levels": Profile((), Uniform(256, 256), BitPack()),
    "int4": NAMED["int4"],
    "16 levels, ANS": Profile((), Uniform(16, 16), Ans()),
    "4 levels": Profile((), Uniform(4, 4), BitPack()),
    "4 levels, ANS": Profile((), Uniform(4, 4), Ans()),
    "kivi-2bit": NAMED["kivi-2bit"],
    "MixHQ, ANS": NAMED["kvserve-default"],
    "cachegen-1": NAMED["cachegen-1"],
    "3 levels, zstd 19": Profile((), Uniform(3, 3), Zstd(level=19)),
}
"""From large and quick to small and slow: a few lines for the latency model, whatever they do to quality."""
