"""The page inspector, and the story that it steps through."""

import pytest
import torch
from explore_helpers import WORDS

from diffkv_repro.diffkv import CompressionPolicy
from diffkv_repro.diffkv.memory_example import inspect_pages
from diffkv_repro.diffkv.memory_walk import faulty_pages
from diffkv_repro.explore import Story, draw_moment, draw_request, effect_of, observe, page_inspector

STORY = Story((40, 7, 70), layers=2, kv_heads=3, generated=9, seed=1)


def shown(figure):
    return sorted(int(page) for trace in figure.data if trace.text is not None for page in trace.text)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_picture_shows_the_pages_of_one_layer(slot, layer):
    memory = STORY.at(6)
    pages = inspect_pages(memory, slot)
    pages = pages[pages["layer"] == layer]
    figure = draw_request(memory, slot, layer)
    assert shown(figure) == shown(draw_moment(STORY, 6, slot, layer)) == sorted(pages["page"])
    assert f"{len(pages)} pages hold {pages['tokens'].sum()} tokens" in figure.layout.title.text


def test_a_story_begins_and_ends_with_all_pages_free_and_loses_none():
    free = []
    for moment in range(len(STORY.moments)):
        memory = STORY.at(moment)
        assert faulty_pages(memory) == 0
        free.append(memory.synchronize_counts())
        figure = draw_moment(STORY, moment, 1, 1)
        listed = [trace for trace in figure.data if trace.name == "free page"]
        assert len(listed[0].x) == free[-1]
    assert free[0] == free[-1] == STORY.at(0).free.numel()
    assert free[2] > free[1] < free[0]  # compaction gives back what the admission took too much
    assert free[6 + 9] <= free[6]


def test_a_story_is_the_same_each_time():
    a, b = STORY.at(12), STORY.at(12)
    assert torch.equal(a.tables, b.tables)
    assert torch.equal(a.lengths, b.lengths)


def test_the_story_of_an_effect_holds_its_tokens(loaded):
    effect = effect_of(
        observe(loaded, WORDS, observed=5, limit=60), CompressionPolicy.paper(alpha_high=3, alpha_low=0.5, window=4)
    )
    story = Story.of(effect, generated=3)
    lengths = story.at(2).lengths[0]
    assert torch.equal(lengths[..., 0], (effect.tiers == 0).sum(-1).int())
    assert torch.equal(lengths[..., 1], (effect.tiers == 1).sum(-1).int())
    grown = story.at(5).lengths[0].sum(-1) - lengths.sum(-1)
    assert ((grown >= 0) & (grown <= 3)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": ()}, "at least one request"),
        ({"prompts": (3, 0)}, "at least one token"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"generated": -1}, "generated is -1"),
        ({"plan": torch.zeros(1, 1, 1, 2, dtype=torch.int32)}, r"it must be \[3, 4, 4, 2\]"),
    ],
)
def test_a_story_that_cannot_be_told_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Story(**options)


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="layer 2 does not exist; layers are 0 to 1"):
        draw_request(STORY.at(6), 0, 2)
    with pytest.raises(ValueError, match="slot 3 does not exist"):
        draw_moment(STORY, 6, 3, 0)
    with pytest.raises(ValueError, match=r"moment is 99; allowed are 0 to \d+"):
        STORY.at(99)


def test_the_inspector_follows_its_controls():
    explorer = page_inspector(STORY)
    for moment, slot, layer in ((1, 0, 0), (6, 2, 1), (0, 1, 0)):
        for name, value in (("moment", moment), ("request", slot), ("layer", layer)):
            explorer.controls[name].value = value
        assert shown(explorer.figure) == shown(draw_moment(STORY, moment, slot, layer))
        assert STORY.moments[moment] in explorer.below.value
