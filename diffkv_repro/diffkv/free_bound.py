"""``FreeBound``: how many pages are free at least, known to the host without asking the device."""

from collections.abc import Iterable, Sequence


class FreeBound:
    """A lower bound of the free pages between two looks at the device's own count.

    A tier takes a page when its last one is full and gains at most one token a step, so over n steps it takes at most
    1 + (n - 1) // tokens pages. Pages that compaction gives back are not known to the host and count as taken until
    the next :meth:`refresh`, as do those that a finished request held before the last one.
    """

    def __init__(self, pages: int, heads: int, tier_tokens: Sequence[int]) -> None:
        self._heads, self._tier_tokens = heads, tuple(tier_tokens)
        self._known = pages
        self._prompts: dict[int, int] = {}  # pages that slots took for their prompts since the last refresh
        self._steps: dict[int, int] = {}  # steps of compacted slots since then

    def free(self, more_steps: int = 0) -> int:
        """Pages that are free at least, also after ``more_steps`` further steps; may be negative."""
        return self._known - sum(self._taken(steps + more_steps) for steps in self._steps.values())

    def admit(self, slot: int, pages: int) -> None:
        """A prompt took ``pages``."""
        self._known -= pages
        self._prompts[slot] = pages

    def compact(self, slot: int) -> None:
        """From now on the slot may take pages in a step."""
        self._steps[slot] = 0

    def step(self, steps: int) -> None:
        """So many steps were made."""
        for slot in self._steps:
            self._steps[slot] += steps

    def release(self, slots: Iterable[int]) -> None:
        """All pages of ``slots`` are free again, among them those they took since the last refresh."""
        for slot in slots:
            self._known += self._prompts.pop(slot, 0)
            self._steps.pop(slot, None)

    def refresh(self, count: int) -> None:
        """The device's count, after everything that was asked of it."""
        self._known = count
        self._prompts.clear()
        self._steps = dict.fromkeys(self._steps, 0)

    def _taken(self, steps: int) -> int:
        if steps < 1:
            return 0
        return self._heads * sum(1 + (steps - 1) // tokens for tokens in self._tier_tokens)
