"""DiffKV's token tiers in the strategy space: the one bridge between the two papers.

:class:`TokenTiers` is a quantizer like the others, from keys and values to a frame and back. A worker whose cache is
DiffKV's has those bytes already: :func:`send` takes them out of its pages and :func:`receive` puts them into the pages
of another :class:`PagedMemory`, which have other ids, perhaps another size. Nothing is decoded or encoded on the way,
and both make the same frames (``token_records`` says what is in them). Bytes of a page in which no token lies are not
sent: they may be another request's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from diffkv_repro.attention_stats.significance import Significance
from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import CompressionPolicy, paged_ops
from diffkv_repro.diffkv.layout import PageLayout, search_page_bytes
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.page_rows import put_rows, take_rows
from diffkv_repro.diffkv.paged_view import PagedRule, PagedView
from diffkv_repro.kvserve.assets import Assets, Place
from diffkv_repro.kvserve.codecs import Codec, CodecError, NoCodec
from diffkv_repro.kvserve.frame import Frame, body_of, section_of
from diffkv_repro.kvserve.header import FrameError, Header
from diffkv_repro.kvserve.layout import KV, KVLayout, LayerKV
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quantizers import QUANTIZERS, Quantizer
from diffkv_repro.kvserve.registry import require_flag, require_whole
from diffkv_repro.kvserve.streams import StreamReader, StreamWriter
from diffkv_repro.kvserve.token_records import Records, read_records, write_records
from diffkv_repro.kvserve.transforms import KeyBias, power_of


@QUANTIZERS.add
@dataclass(frozen=True)
class TokenTiers(Quantizer):
    """Tokens at the precisions of ``tiers`` or dropped, by DiffKV's thresholds, every head by itself (its section 4).

    ``alphas``, ``window`` and ``by_position`` as in :class:`CompressionPolicy`; scores count over the last ``observed``
    queries of the prompt, or over all later ones (0). They are in ``Assets.received``. Frames carry running scores and
    positions too, so that the receiver can go on as the policy would. Error: half a step of a vector's range.
    """

    tiers: tuple[str, ...] = ("K8V4", "K4V2")
    alphas: tuple = (1.0, 0.02)
    window: int = 64
    observed: int = 0
    own_score: bool = False
    by_position: bool = False
    name: ClassVar[str] = "diffkv"
    format_id: ClassVar[int] = 10

    def __post_init__(self) -> None:
        if not isinstance(self.tiers, tuple) or not isinstance(self.alphas, tuple):
            raise ValueError(f"tiers are {self.tiers!r} and alphas {self.alphas!r}; each is a tuple, one for each tier")
        require_whole("observed", self.observed, 0)
        for name in ("own_score", "by_position"):
            require_flag(name, getattr(self, name))
        policy = self.policy
        object.__setattr__(self, "tiers", tuple(map(str, policy.tiers)))
        object.__setattr__(self, "alphas", policy.alphas)

    @classmethod
    def of(cls, policy: CompressionPolicy) -> Self:
        """What decides a prompt in ``policy``; what it does in generation is the affair of whoever generates.

        Keys without their bias are the transform ``keybias`` before this quantizer.
        """
        rule = policy.significance
        observed = rule.observed if rule.queries == "last" else 0
        by_position = policy.prompt_divisor == "position"
        return cls(tuple(map(str, policy.tiers)), policy.alphas, policy.window, observed, rule.own_score, by_position)

    @property
    def policy(self) -> CompressionPolicy:
        """With one running score a KV head, as pages have it."""
        return CompressionPolicy(
            self.tiers, self.alphas, self.window, self.significance,
            "position" if self.by_position else "length", group_max="each-step",
        )  # fmt: skip

    @property
    def significance(self) -> Significance:
        """The scores that it decides by: :func:`prefill` can collect them."""
        if not self.observed:
            return Significance(own_score=self.own_score)
        return Significance("last", self.observed, self.own_score)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Of the tiers."""
        return tuple(map(Precision.parse, self.tiers))

    def layouts(self, head_dim: int, page_bytes: int | None = None) -> tuple[PageLayout, ...]:
        """Pages for these tiers, of the size with the least slack unless given. Raises ValueError where none fits."""
        size = page_bytes or search_page_bytes(self.precisions, head_dim)
        return tuple(PageLayout(precision, head_dim, size) for precision in self.precisions)

    def decide(self, place: Place) -> tuple[Tensor, Tensor]:
        """Tiers int8 [kv_heads, tokens] (-1: dropped) and the scores float32 that they follow from."""
        given = place.assets.received
        if given is None or given.rule != self.significance:
            found = "none" if given is None else f"those of {given.rule}"
            raise ValueError(
                f"quantizer {self.name} decides by scores of {self.significance} and was given {found}: pass "
                "assets=Assets(received=prefill(..., significance=quantizer.significance).received)"
            )
        sums = torch.as_tensor(given.sums[place.layer]).float().cpu()
        if tuple(sums.shape) != place.shape[:2]:
            raise ValueError(f"received scores are {tuple(sums.shape)}; {place.shape[:2]} are needed")
        rule = PagedRule(
            self._alphas(place), self.window, self.observed, self.own_score, self.by_position, False, "algorithm-1"
        )
        length = torch.tensor([place.tokens], dtype=torch.int32)
        return paged_ops.classify(sums[None], length, rule, layer=0)[0], sums

    def encode(self, layer: LayerKV, place: Place, streams: StreamWriter) -> None:
        for precision in self.precisions:
            PageLayout.holding(precision, place.layout.head_dim, 1)  # channels that fill no page are refused
        tiers, scores = self.decide(place)
        position = torch.arange(place.start, place.start + place.tokens, dtype=torch.int32).expand_as(tiers)
        chosen = [tiers == index for index in range(len(self.tiers))]
        counts = torch.stack([own.sum(dim=1) for own in chosen], dim=1).to(torch.int32)
        rows = [(layer.key[own], layer.value[own], scores[own], position[own]) for own in chosen]
        records = [Records.of(*own, precision) for own, precision in zip(rows, self.precisions, strict=True)]
        write_records(streams, counts, records)

    def decode(self, place: Place, streams: StreamReader) -> LayerKV:
        counts, records = read_records(streams, place, self.precisions)
        found = torch.zeros(2, *place.shape, dtype=place.dtype)
        kept = torch.zeros(place.shape[:2], dtype=torch.bool)
        for tier, (own, precision) in enumerate(zip(records, self.precisions, strict=True)):
            head = torch.repeat_interleave(torch.arange(len(counts)), counts[:, tier])
            at = own.positions.view(torch.int32)[:, 0].long() - place.start
            found[0, head, at], found[1, head, at] = own.vectors(precision, place.layout.head_dim, place.dtype)
            kept[head, at] = True
        return LayerKV(*found, None if bool(kept.all()) else kept)

    def _alphas(self, place: Place) -> Tensor:
        """Float32 [1, tiers, kv_heads] of a layer."""
        rows = []
        for alpha in self.alphas:
            own = alpha if isinstance(alpha, float) else alpha[place.layer] if place.layer < len(alpha) else ()
            row = torch.tensor(own, dtype=torch.float32)
            if row.ndim and len(row) != place.layout.kv_heads:
                raise ValueError(
                    f"alphas of layer {place.layer} are {own}; the layout has {place.layout.kv_heads} heads"
                )
            rows.append(row.expand(place.layout.kv_heads))
        return torch.stack(rows)[None]


def profile_of(policy: CompressionPolicy, codec: Codec | None = None) -> Profile:
    """``policy`` as a profile; bias-free keys are the transform ``keybias``."""
    return Profile((KeyBias(),) if policy.bias_free else (), TokenTiers.of(policy), codec or NoCodec())


def store_prompt(memory: PagedMemory, slot: int, kv: KV, profile: Profile, layout: KVLayout, assets: Assets) -> None:
    """Compress a prompt into the pages of an empty ``slot``, as ``profile`` would into a frame.

    Raises OutOfPages, and ValueError for pages of other tiers, for a ``kv`` that is no whole prompt and for numbers
    beyond FP16.
    """
    tiers_of = _tiers_of(profile, memory, layout)
    if kv.start or profile.transforms:
        raise ValueError(f"kv starts at {kv.start}, with {len(profile.transforms)} transforms; allowed are 0 and none")
    if any(power_of(part) for pair in kv.pairs for part in pair):
        raise ValueError("keys or values lie beyond +-65504, the range of FP16, in which pages have scales")
    places = [Place(layout, layer, kv.tokens, assets=assets) for layer in range(layout.layers)]
    decided = [tiers_of.decide(place) for place in places]
    parts = [paged_ops.partition(tiers[None].to(memory.device), len(tiers_of.tiers)) for tiers, _ in decided]
    memory.admit([slot], [kv.tokens])
    try:
        memory.compact([slot], torch.stack([counts for _, counts in parts], dim=1).contiguous())
        row = torch.tensor([slot], dtype=torch.int32, device=memory.device)
        for layer, (own, (tiers, scores), (slots, _)) in enumerate(zip(kv.layers, decided, parts, strict=True)):
            given = (part[None].to(memory.device) for part in (own.key, own.value, tiers, slots[0], scores))
            paged_ops.pack(view_of(memory), *given, row, layer=layer)
    except Exception:
        memory.release([slot])
        raise


def send_pages(
    memory: PagedMemory, slot: int, tokens: int, profile: Profile, layout: KVLayout, *,
    assets: Assets | None = None, metadata: Mapping[str, Any] | None = None,
) -> Frame:  # fmt: skip
    """What the pages of ``slot`` hold after ``tokens`` tokens of a sequence, as a frame; the slot stays as it is.

    Waits for the device. Raises ValueError for pages of other tiers and for a slot without a compacted prompt.
    """
    precisions = _tiers_of(profile, memory, layout).precisions
    memory.kv_bytes([slot])  # refuses a slot that holds nothing
    if not bool(memory.state.ready[slot]):
        raise ValueError(f"slot {slot} is not compacted yet; what is in its pages is not known")
    known, view, lengths = assets or Assets(), view_of(memory), memory.lengths[slot].cpu()
    if (most := int(lengths.sum(dim=-1).max())) > tokens:
        raise ValueError(f"slot {slot} holds {most} tokens of a head; tokens is {tokens}")
    header = Header(profile, layout, 0, tokens, profile.state(known), metadata or {})
    profile.codec.require()
    sections = []
    for layers in _blocks(layout.layers):
        sizes = lengths[layers.start : layers.stop].sum(dim=1).tolist()
        tiers = [take_rows(view, slot, layers, tier) for tier in range(len(precisions))]
        split = [[part.split([own[tier] for own in sizes]) for part in parts] for tier, parts in enumerate(tiers)]
        for row, layer in enumerate(layers):
            streams = StreamWriter(profile.codec)
            streams.meta(_UNSCALED)
            records = [Records(*(part[row] for part in parts)) for parts in split]
            write_records(streams, lengths[layer].contiguous(), records)
            sections.append(section_of(header, layer, streams))
    return Frame(header, tuple(sections), known)


def receive_pages(frame: Frame, memory: PagedMemory, slot: int, *, assets: Assets | None = None) -> None:
    """Put a frame of :class:`TokenTiers` into the pages of an empty ``slot``, without decoding a number.

    Everything is looked at before a page is taken. Raises FrameError for a frame that is damaged, of another model or
    other tiers, or does not begin at position 0; OutOfPages; and ValueError for a slot in use.
    """
    header, used = frame.header, assets or frame.assets
    try:
        precisions = _tiers_of(header.profile, memory, header.layout).precisions
    except ValueError as error:
        raise FrameError(str(error)) from error
    if header.start or header.tokens > memory.max_tokens:
        raise FrameError(
            f"a frame of {header.tokens} tokens from position {header.start} on; these pages are for requests of at "
            f"most {memory.max_tokens} from 0 on"
        )
    header.require_state(used)
    layers = [_unpacked(frame, layer, precisions, used) for layer in range(header.layout.layers)]
    memory.admit([slot], [header.tokens])
    try:
        lengths = torch.stack([counts for counts, _ in layers])[None].to(torch.int32)
        memory.compact([slot], lengths.to(memory.device))
        view = view_of(memory)
        for block in _blocks(len(layers)):
            for tier in range(len(precisions)):
                parts = [layers[layer][1][tier].parts for layer in block]
                put_rows(view, slot, block, tier, [torch.cat(part) for part in zip(*parts, strict=True)])
    except Exception:
        memory.release([slot])
        raise


def view_of(memory: PagedMemory) -> PagedView:
    """The pages for attention."""
    return PagedView(memory.pool, memory.tables, memory.lengths, memory.layouts)


def _blocks(layers: int) -> list[range]:
    """Layers that are moved at a time: enough to keep the device busy, few enough to need little memory beside."""
    return [range(start, min(start + _BLOCK, layers)) for start in range(0, layers, _BLOCK)]


_BLOCK = 8
_UNSCALED = torch.zeros(2, dtype=torch.uint8)  # powers of two by which a frame's keys and values were divided


def _tiers_of(profile: Profile, memory: PagedMemory, layout: KVLayout) -> TokenTiers:
    """The quantizer of ``profile``, if ``memory`` has its tiers and the layers and heads of ``layout``."""
    quantizer = profile.quantizer
    if not isinstance(quantizer, TokenTiers) or profile.transforms not in ((), (KeyBias(),)):
        raise ValueError(f"profile {profile} has no pages; needed is {TokenTiers.name}, perhaps after {KeyBias.name}")
    if (own := tuple(page.precision for page in memory.layouts)) != quantizer.precisions:
        raise ValueError(f"the pages are of {'-'.join(map(str, own))}, the profile of {'-'.join(quantizer.tiers)}")
    _, _, layers, kv_heads, _ = memory.tables.shape
    shape = layers, kv_heads, memory.layouts[0].head_dim
    if shape != (layout.layers, layout.kv_heads, layout.head_dim) or not len(memory.pool):
        raise ValueError(
            f"{len(memory.pool)} pages are for {shape} (layers, KV heads, head_dim); the layout is {layout}"
        )
    return quantizer


def _unpacked(
    frame: Frame, layer: int, precisions: Sequence[Precision], assets: Assets
) -> tuple[Tensor, list[Records]]:
    header = frame.header
    place = Place(header.layout, layer, header.tokens, assets=assets)
    streams = StreamReader(body_of(frame.sections[layer]), header.profile.codec)
    try:
        if streams.meta((2,), torch.uint8).any():
            raise CodecError("its numbers were scaled to fit FP16, and pages hold no such scale")
        found = read_records(streams, place, precisions)
        streams.finish()
    except CodecError as error:
        raise FrameError(f"layer {layer} is damaged: {error}") from error
    return found
