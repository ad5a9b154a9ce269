"""The page inspector: which pages a request holds and how full they are, moment by moment."""

import ipywidgets
import plotly.graph_objects as go

from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.memory_example import Snapshot, inspect_pages
from diffkv_repro.explore.panel import Explorer, State, View, as_html
from diffkv_repro.explore.story import Story
from diffkv_repro.study import drawing
from diffkv_repro.study.plots.memory import request_pages
from diffkv_repro.study.plots.pages import tables_and_list


def draw_request(memory: PagedMemory, slot: int, layer: int) -> go.Figure:
    """The pages of one layer of the request in ``slot``. Raises ValueError for what does not exist."""
    pages = _pages_of_layer(memory, slot, layer)
    title = f"Request {slot}, layer {layer}: {len(pages)} pages hold {pages['tokens'].sum():,} tokens"
    figure = request_pages(pages, memory.tables.shape[-1], _tier_names(memory), title)
    return drawing.finish(figure, "numbers are page ids; paler pages are partly filled")


def draw_moment(story: Story, moment: int, request: int, layer: int) -> go.Figure:
    """The tables of one layer of ``request`` at a moment of ``story``, and the free list. Raises ValueError as well."""
    memory = story.at(moment)
    pages, shot = _pages_of_layer(memory, request, layer), Snapshot.of("", memory, request)
    title = f"Request {request}, layer {layer}: {len(pages)} pages hold {pages['tokens'].sum():,} tokens"
    figure = tables_and_list(
        pages, memory.tables.shape[-1], _tier_names(memory), shot.slots, shot.head, shot.tail, title
    )
    count = f"{len(shot.free):,} of {memory.free.numel():,} pages are free"
    return drawing.finish(figure, f"moment {moment}: {story.moments[moment]}; {count}; paler pages are partly filled")


def page_inspector(story: Story) -> Explorer:
    """Step through ``story``, choose a request and a layer, see its pages and the free list."""
    slow = {"continuous_update": False}
    controls = {
        "moment": ipywidgets.IntSlider(
            value=2, min=0, max=len(story.moments) - 1, description="moment", layout={"width": "34rem"}, **slow
        ),
        "request": ipywidgets.Dropdown(options=range(len(story.prompts)), description="request"),
        "layer": ipywidgets.IntSlider(min=0, max=story.layers - 1, description="layer", **slow),
    }  # fmt: skip

    def show(state: State) -> View:
        figure = draw_moment(story, state["moment"], state["request"], state["layer"])
        pages = _pages_of_layer(story.at(state["moment"]), state["request"], state["layer"])
        happened = f"<p><b>{story.moments[state['moment']]}</b></p>"
        columns = ["head", "tier", "entry", "page", "tokens", "capacity"]
        return View(figure, happened + as_html(pages[columns].set_index("head"), "pages of this layer"))

    def code(state: State) -> str:
        given = f"{story.prompts}, {story.layers}, {story.kv_heads}, {story.generated}, {story.seed}"
        plan = [] if story.plan is None else [f"plan = torch.tensor({story.plan.tolist()}, dtype=torch.int32)"]
        more = f", {story.tiers}, {story.head_dim}" + (", plan" if plan else "")
        return "\n".join([
            *(["import torch", ""] if plan else []),
            "from diffkv_repro.explore import Story, draw_moment",
            "",
            *plan,
            f"story = Story({given}{more})",
            f"memory = story.at({state['moment']})",
            f"figure = draw_moment(story, {state['moment']}, {state['request']}, {state['layer']})",
        ])  # fmt: skip

    return Explorer(controls, show, code=code)


def _pages_of_layer(memory: PagedMemory, slot: int, layer: int):
    layers = memory.lengths.shape[1]
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} does not exist; layers are 0 to {layers - 1}")
    pages = inspect_pages(memory, slot)
    return pages[pages["layer"] == layer]


def _tier_names(memory: PagedMemory) -> list[str]:
    return [f"tier {tier}, {layout.precision}" for tier, layout in enumerate(memory.layouts)]
