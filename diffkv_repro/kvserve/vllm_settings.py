"""What ``kv_connector_extra_config`` may say to the vLLM connector. Needs no vLLM."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from diffkv_repro.kvserve import link_store  # noqa: F401  (registers tcp://)
from diffkv_repro.kvserve.frame_store import GRAIN, FrameStore, open_store
from diffkv_repro.kvserve.latency import ANY_WORKLOAD
from diffkv_repro.kvserve.library import ProfileLibrary, profile_of
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.registry import require_whole

DEFAULT_PROFILE = "lossless-zstd"


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings of one vLLM instance.

    - ``store``: a folder, or the address of a store (``tcp://HOST:PORT``); the one setting that is needed.
    - ``keys``: folder of the keys for an address, that of ``diffkv-repro serve keys`` unless given. Or
      ``insecure``: true for none, which a server takes from its own host alone.
    - ``profile``: the name of a profile, or its parts; lossless unless given. Or
      ``profiles``: the file of a :class:`ProfileLibrary`, from which a controller chooses for each request by
      ``workload``, ``min_quality`` (relative to the uncompressed cache), ``slo`` (seconds for encoding, sending and
      decoding) and ``bandwidth`` (bytes a second; learnt from receipts unless given).
    - ``head_scores``: the file of :class:`HeadScores`, for profiles that rank heads (MixHQ); only the writer needs it.
    - ``model_id``: what identifies the weights; found out from the files of a local model, and from a hub's commit.
    - ``namespace``: instances use each other's frames only within one.
    - ``min_tokens``: shorter beginnings of prompts are not transferred.
    - ``store_gib``: a folder's size, above which the frames that were used longest ago go.
    """

    store: str
    keys: str | None = None
    insecure: bool = False
    profile: Any = None
    profiles: str | None = None
    workload: str = ANY_WORKLOAD
    min_quality: float = 0.0
    slo: float = math.inf
    bandwidth: float | None = None
    head_scores: str | None = None
    model_id: str | None = None
    namespace: str = ""
    min_tokens: int = 4 * GRAIN
    store_gib: float = math.inf

    def __post_init__(self) -> None:
        for name in ("store", "workload", "namespace"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; a text is needed")
        for name in ("keys", "profiles", "head_scores", "model_id"):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, str) and given):
                raise ValueError(f"{name} is {given!r}; a text is needed, or nothing")
        if not self.store:
            raise ValueError("store is ''; name a folder or an address that both instances can reach")
        if not isinstance(self.insecure, bool):
            raise ValueError(f"insecure is {self.insecure!r}; allowed are true, false")
        if self.profile is not None and self.profiles is not None:
            raise ValueError(
                "profile and profiles are both given; one profile for all requests, or a library, not both"
            )
        for name in ("slo", "store_gib", "bandwidth"):
            value = getattr(self, name)
            if value is not None and not (_number(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; it must be a number above 0")
        if not (_number(self.min_quality) and 0 <= self.min_quality < math.inf):
            raise ValueError(f"min_quality is {self.min_quality!r}; it must be a number of at least 0")
        require_whole("min_tokens", self.min_tokens, 1)
        if self.profiles is None:
            adaptive = {"min_quality": 0.0, "slo": math.inf, "bandwidth": None, "workload": ANY_WORKLOAD}
            for name, default in adaptive.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{name} is given without profiles: only a library leaves something to choose")

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Self:
        """Settings from the mapping that vLLM hands over. Raises ValueError for an unknown key, naming all allowed."""
        allowed = [item.name for item in fields(cls)]
        unknown = sorted(set(map(str, extra)) - set(allowed))
        if unknown:
            raise ValueError(f"kv_connector_extra_config has no {unknown[0]!r}; allowed are {', '.join(allowed)}")
        if "store" not in extra:
            raise ValueError(
                "kv_connector_extra_config lacks 'store', a folder or an address that both instances can reach"
            )
        return cls(**extra)

    def library(self) -> ProfileLibrary | None:
        """The library of ``profiles``, None without. Raises ValueError naming the file where it cannot be used."""
        return None if self.profiles is None else ProfileLibrary.load(self.profiles)

    def chosen(self) -> Profile:
        """The one profile where there is no library."""
        return profile_of(DEFAULT_PROFILE if self.profile is None else self.profile)

    def open(self) -> FrameStore:
        """The store. Raises ValueError for an address of no known kind and for keys that cannot be used, OSError where
        a folder cannot be reached; an address is not asked yet."""
        options = {name: getattr(self, name) for name in ("keys", "insecure") if getattr(self, name)}
        return open_store(self.store, most_bytes=self.store_gib * 2**30, **options)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
