"""A memory manager in plain Python, one page at a time, written from the paper's text to judge the fast ones by."""

from collections.abc import Iterable, Mapping, Sequence

Head = tuple[int, int, int]
"""Request slot, layer, KV head."""


class OracleManager:
    """What section 5.2 of the paper says, without tensors.

    ``queue`` holds the free page ids, next to take first. ``taken`` and ``recycled`` count pages ever taken from and
    put into the list: modulo ``pages`` they are the head and the tail of the circular one. ``held`` maps a head to its
    pages by tier, ``tokens`` to its tokens by tier. Lengths are nested lists or mappings by head.
    """

    def __init__(
        self, tokens_per_page: Sequence[int], *, pages: int, layers: int, kv_heads: int, entries: int, spare: int
    ) -> None:
        self.tokens_per_page, self.pages, self.entries, self.spare = list(tokens_per_page), pages, entries, spare
        self.layers, self.kv_heads = layers, kv_heads
        self.queue: list[int] = list(range(pages))
        self.taken = self.recycled = 0
        self.held: dict[Head, list[list[int]]] = {}
        self.tokens: dict[Head, list[int]] = {}
        self.compacted: set[int] = set()

    def heads(self, slot: int) -> Iterable[Head]:
        """The heads of a request, layer by layer."""
        return ((slot, layer, head) for layer in range(self.layers) for head in range(self.kv_heads))

    def prompt_pages(self, tokens: int) -> int:
        """As if every token went into the smallest page; plus the spare ones."""
        pages = self.spare
        while tokens > 0:
            pages, tokens = pages + 1, tokens - min(self.tokens_per_page)
        return pages

    def admit(self, slot: int, tokens: int) -> None:
        """Each head takes the pages of a prompt; all count for the first tier until the plan is known."""
        for head in self.heads(slot):
            pages = [self._take() for _ in range(self.prompt_pages(tokens))]
            self.held[head] = [pages, *([] for _ in self.tokens_per_page[1:])]
            self.tokens[head] = [0] * len(self.tokens_per_page)

    def compact(self, slot: int, lengths: Mapping[Head, Sequence[int]]) -> None:
        """Each head keeps pages from both ends of its allocation, tier by tier, and gives back the middle."""
        for head in self.heads(slot):
            allocated = self.held[head][0]
            kept = []
            for tier, tokens in enumerate(lengths[head]):
                own = []
                while len(own) * self.tokens_per_page[tier] < tokens:
                    own.append(allocated.pop(0) if tier % 2 == 0 else allocated.pop())
                kept.append(own)
            for page in allocated:
                self._recycle(page)
            self.held[head], self.tokens[head] = kept, list(lengths[head])
        self.compacted.add(slot)

    def step(self, slots: Iterable[int]) -> bool:
        """A page for every tier that has no room for one more token. False, and nothing done, where that cannot be."""
        wanting = [
            (head, tier)
            for slot in sorted(slots)
            if slot in self.compacted
            for head in self.heads(slot)
            for tier, size in enumerate(self.tokens_per_page)
            if self.tokens[head][tier] == len(self.held[head][tier]) * size
        ]
        used = {}
        for head, tier in wanting:
            used.setdefault((head, tier // 2), sum(map(len, self.held[head][tier // 2 * 2 : tier // 2 * 2 + 2])))
            used[head, tier // 2] += 1
        if len(wanting) > len(self.queue) or any(count > self.entries for count in used.values()):
            return False
        for head, tier in wanting:
            self.held[head][tier].append(self._take())
        return True

    def append(self, head: Head, tier: int) -> None:
        """One more token of a tier, into the room that a step has made sure of."""
        assert self.tokens[head][tier] < len(self.held[head][tier]) * self.tokens_per_page[tier]
        self.tokens[head][tier] += 1

    def release(self, slot: int) -> None:
        """All pages of a request go back, head by head, tier by tier."""
        for head in self.heads(slot):
            for pages in self.held.pop(head):
                for page in pages:
                    self._recycle(page)
            del self.tokens[head]
        self.compacted.discard(slot)

    def row(self, head: Head, table: int) -> list[int]:
        """A head's row of a table: the even tier from the left, the odd one from the right, -1 between."""
        row = [-1] * self.entries
        tiers = self.held.get(head, [[] for _ in self.tokens_per_page])
        for j, page in enumerate(tiers[2 * table]):
            assert row[j] == -1
            row[j] = page
        for j, page in enumerate(tiers[2 * table + 1] if 2 * table + 1 < len(tiers) else []):
            assert row[self.entries - 1 - j] == -1
            row[self.entries - 1 - j] = page
        return row

    def _take(self) -> int:
        self.taken += 1
        return self.queue.pop(0)

    def _recycle(self, page: int) -> None:
        self.recycled += 1
        self.queue.append(page)
