"""The page inspector: which pages a request holds, and how full they are."""

from collections.abc import Mapping

import ipywidgets
import plotly.graph_objects as go
import torch

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.layout import PageLayout
from diffkv_repro.diffkv.memory import PagedMemory
from diffkv_repro.diffkv.memory_example import inspect_pages
from diffkv_repro.diffkv.memory_walk import share_out
from diffkv_repro.study import drawing
from diffkv_repro.study.plots.memory import request_pages


def filled_memory(prompts: Mapping[int, int], *, layers: int = 4, kv_heads: int = 4, seed: int = 0) -> PagedMemory:
    """A memory with prompts of so many tokens in the slots given, split at random over K8V4, K4V2 and pruned."""
    layouts = [PageLayout(Precision.parse(name), head_dim=128, page_bytes=3456) for name in ("K8V4", "K4V2")]
    longest = max(prompts.values())
    held = -(-longest // layouts[0].tokens) + len(layouts)
    memory = PagedMemory(
        layouts, pages=held * len(prompts) * layers * kv_heads, layers=layers, kv_heads=kv_heads,
        max_requests=max(prompts) + 1, max_tokens=longest, watermark=0.0, pool=False,
    )  # fmt: skip
    slots, tokens = list(prompts), list(prompts.values())
    memory.admit(slots, tokens)
    planned = share_out(tokens, (layers, kv_heads), len(layouts), torch.Generator().manual_seed(seed))
    memory.compact(slots, planned)
    return memory


def draw_request(memory: PagedMemory, slot: int, layer: int) -> go.Figure:
    """The pages of one layer of the request in ``slot``. Raises ValueError for what does not exist."""
    layers = memory.lengths.shape[1]
    if not 0 <= layer < layers:
        raise ValueError(f"layer {layer} does not exist; layers are 0 to {layers - 1}")
    pages = inspect_pages(memory, slot)
    pages = pages[pages["layer"] == layer]
    title = f"Request {slot}, layer {layer}: {len(pages)} pages hold {pages['tokens'].sum():,} tokens"
    tiers = [f"tier {tier}, {layout.precision}" for tier, layout in enumerate(memory.layouts)]
    figure = request_pages(pages, memory.tables.shape[-1], tiers, title)
    return drawing.finish(figure, "numbers are page ids; paler pages are partly filled")


def page_inspector(memory: PagedMemory) -> ipywidgets.VBox:
    """Choose a request and a layer, see its pages.

    Without an ``Output`` widget: those swallow what a callback raises, and nbclient waits for them in vain.
    """
    held = memory.page_counts.sum(dim=(1, 2, 3)).tolist()
    slots = [slot for slot, pages in enumerate(held) if pages]
    if not slots:
        raise ValueError("no request holds a page; there is nothing to inspect")
    request = ipywidgets.Dropdown(options=slots, description="request")
    layer = ipywidgets.IntSlider(min=0, max=memory.lengths.shape[1] - 1, description="layer")
    box = ipywidgets.VBox()

    def show(_: object = None) -> None:
        picture = go.FigureWidget(draw_request(memory, request.value, layer.value))
        box.children = (ipywidgets.HBox([request, layer]), picture)

    for control in (request, layer):
        control.observe(show, names="value")
    show()
    return box
