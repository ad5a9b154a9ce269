"""``Profile``: a transform, a quantizer and a codec with their parameters, KVServe's C(Q(T(X)))."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import yaml
from torch import Tensor

from diffkv_repro.kvserve import cachegen, contrib, entropy, kvquant, ladders, nvcomp, token_ladder  # noqa: F401 (they register their parts)
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.codecs import CODECS, Codec, NoCodec
from diffkv_repro.kvserve.layout import KV, KVLayout, LayerKV
from diffkv_repro.kvserve.quantizers import QUANTIZERS, Exact, Quantizer
from diffkv_repro.kvserve.transforms import TRANSFORMS, Transform

if TYPE_CHECKING:
    from diffkv_repro.kvserve.frame import Frame

MOST_TRANSFORMS = 8
NAMES: dict[str, "Profile"] = {}
"""What :meth:`Profile.named` finds; ``named`` fills it, which the package imports."""

contrib.register()


@dataclass(frozen=True)
class Profile:
    """``transforms`` in the order in which they are applied (none, one or several), then a quantizer and a codec.

    Hashable; prints as one line, ``hadamard | mixhq r=0.8 K12/6 V8/4 | ans``; goes to YAML and back.
    """

    transforms: tuple[Transform, ...] = ()
    quantizer: Quantizer = field(default_factory=Exact)
    codec: Codec = field(default_factory=NoCodec)

    def __post_init__(self) -> None:
        given = (self.transforms,) if isinstance(self.transforms, Transform) else tuple(self.transforms)
        object.__setattr__(self, "transforms", given)
        if len(given) > MOST_TRANSFORMS:
            raise ValueError(f"{len(given)} transforms were given; at most {MOST_TRANSFORMS} are allowed")
        parts = [(part, Transform) for part in given] + [(self.quantizer, Quantizer), (self.codec, Codec)]
        for part, kind in parts:
            if not isinstance(part, kind):
                raise ValueError(f"{part!r} is no {kind.__name__.lower()}; a profile is transforms | quantizer | codec")

    def __str__(self) -> str:
        before = " + ".join(map(str, self.transforms)) or "none"
        return f"{before} | {self.quantizer} | {self.codec}"

    @classmethod
    def named(cls, name: str) -> Self:
        """A published method, or KVServe's default. Raises ValueError with the known names."""
        if name not in NAMES:
            raise ValueError(f"unknown profile {name!r}; allowed are {', '.join(NAMES)}")
        return NAMES[name]

    @classmethod
    def parse(cls, text: str) -> Self:
        """The profile that ``text`` names or describes as :meth:`__str__` does.

        ``hadamard + delta | mixhq r=0.8 K12/6 V8/4 | ans level=3``: transforms, a quantizer, a codec; parameters left
        out are at their defaults. Raises ValueError for what is neither.
        """
        from diffkv_repro.kvserve.named import NAMED

        stages = [stage.strip() for stage in text.split("|")]
        if text.strip() in NAMED:
            return NAMED[text.strip()]
        if len(stages) != 3:
            known = ", ".join(NAMED)
            raise ValueError(
                f"profile {text!r} has {len(stages)} stages; write transforms | quantizer | codec, or {known}"
            )
        before = [part for part in stages[0].split("+") if part.strip() != "none"]
        return cls(tuple(map(TRANSFORMS.parse, before)), QUANTIZERS.parse(stages[1]), CODECS.parse(stages[2]))

    @property
    def identity(self) -> dict[str, Any]:
        """What a result depends on: :meth:`as_dict`."""
        return self.as_dict()

    def as_dict(self) -> dict[str, Any]:
        """Plain data: every part with its name and all parameters."""
        return {
            "transforms": [{"name": part.name} | part.params() for part in self.transforms],
            "quantizer": {"name": self.quantizer.name} | self.quantizer.params(),
            "codec": {"name": self.codec.name} | self.codec.params(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The profile of :meth:`as_dict`; a part may be its name alone. Raises ValueError for anything unknown."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a profile is {data!r}; needed is a mapping of transforms, quantizer and codec")
        unknown = sorted(set(map(str, data)) - {"transforms", "quantizer", "codec"})
        if unknown:
            raise ValueError(f"a profile has no {unknown[0]!r}; allowed are transforms, quantizer, codec")
        given = data.get("transforms") or []
        listed = given if isinstance(given, list | tuple) else [given]
        return cls(
            tuple(_part(TRANSFORMS, item) for item in listed if item != "none"),
            _part(QUANTIZERS, data.get("quantizer", "none")),
            _part(CODECS, data.get("codec", "none")),
        )

    def to_yaml(self) -> str:
        """A YAML document of :meth:`as_dict`."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """The profile of a YAML document. Raises ValueError for a document that holds none."""
        try:
            return cls.from_dict(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ValueError(f"a profile is not YAML: {error}") from error

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that change with any parameter: an id that is the same in every process."""
        return hashlib.sha256(repr(self.as_dict()).encode()).hexdigest()[:12]

    def state(self, assets: Assets) -> bytes:
        """Digest [16 bytes] of what both sides must share, zeros for nothing. Raises ValueError where it is missing."""
        states = [part.state(assets) for part in self.transforms]
        return hashlib.sha256(b"\0".join(states)).digest()[:16] if any(states) else bytes(16)

    def encode(
        self,
        kv: "KV | Iterable[tuple[Tensor, Tensor]]",
        layout: KVLayout,
        *,
        assets: Assets | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> "Frame":
        """``kv`` of a model of ``layout`` as a frame, layer by layer.

        ``metadata`` is anything that JSON can hold. Raises ValueError for keys or values of another shape or dtype,
        NaN and infinities, and for missing assets; CodecUnavailable where the codec cannot run.
        """
        from diffkv_repro.kvserve.frame import Frame

        return Frame.of(self, KV.of(kv), layout, assets or Assets(), metadata or {})

    def stream(
        self,
        layers: Iterable[LayerKV],
        layout: KVLayout,
        tokens: int,
        *,
        start: int = 0,
        assets: Assets | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Iterator[bytes]:
        """The bytes of the same frame in pieces, the header first: a layer is taken when its piece is asked for."""
        from diffkv_repro.kvserve.frame import stream

        return stream(self, layers, layout, tokens, start, assets or Assets(), metadata or {})


def _part(registry: Any, given: Any) -> Any:
    if isinstance(given, str):
        return registry.make(given)
    if not isinstance(given, Mapping) or "name" not in given:
        raise ValueError(f"{registry.kind} is {given!r}; needed is a name, or a mapping with a name and parameters")
    return registry.make(given["name"], {key: value for key, value in given.items() if key != "name"})
