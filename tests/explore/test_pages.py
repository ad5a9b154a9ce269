import pytest

from diffkv_repro.diffkv.memory_example import inspect_pages
from diffkv_repro.explore.pages import draw_request, filled_memory, page_inspector

PROMPTS = {0: 40, 2: 70}


def shown(figure):
    return sorted(int(page) for trace in figure.data if trace.text is not None for page in trace.text)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("slot", PROMPTS)
def test_a_picture_shows_the_pages_of_one_layer(slot, layer):
    memory = filled_memory(PROMPTS, layers=2, kv_heads=3, seed=1)
    pages = inspect_pages(memory, slot)
    pages = pages[pages["layer"] == layer]
    figure = draw_request(memory, slot, layer)
    assert shown(figure) == sorted(pages["page"])
    assert f"{len(pages)} pages hold {pages['tokens'].sum()} tokens" in figure.layout.title.text


def test_what_does_not_exist_is_refused():
    memory = filled_memory(PROMPTS, layers=2)
    with pytest.raises(ValueError, match="layer 2 does not exist; layers are 0 to 1"):
        draw_request(memory, 0, 2)
    with pytest.raises(ValueError, match="slot 3 does not exist"):
        draw_request(memory, 3, 0)
    memory.release(list(PROMPTS))
    with pytest.raises(ValueError, match="no request holds a page"):
        page_inspector(memory)


def test_a_slot_without_pages_is_an_empty_picture():
    assert shown(draw_request(filled_memory(PROMPTS), 1, 0)) == []


def test_the_inspector_follows_its_controls():
    memory = filled_memory(PROMPTS, layers=2)
    box = page_inspector(memory)
    request, layer = box.children[0].children
    assert list(request.options) == [0, 2]
    for slot, one in ((0, 0), (2, 0), (2, 1)):
        request.value, layer.value = slot, one
        assert shown(box.children[1]) == shown(draw_request(memory, slot, one))
