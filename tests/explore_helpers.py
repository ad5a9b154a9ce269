"""What the tests of all explorers share: texts and profiles, and random moves of every control."""

import random

import ipywidgets
import numpy as np

from diffkv_repro.kvserve.latency import MeasuredProfile

WORDS = " ".join(f"w{3 + (7 * i * i + i) % 90}" for i in range(90))
OTHER_WORDS = " ".join(f"w{3 + (5 * i * i + 3 * i) % 90}" for i in range(70))
PROFILES = [
    MeasuredProfile("2x", 2, 16e9, 16e9, {"*": 1.0}),
    MeasuredProfile("4x", 4, 4e9, 5e9, {"*": 0.97}),
    MeasuredProfile("8x", 8, 1e9, 2e9, {"*": 0.9}),
    MeasuredProfile("not judged", 12, 8e8, 2e9, {}),
]


def move(control, generator, texts=()):
    """Another value of ``control``, at random, as a user could give it."""
    if isinstance(control, ipywidgets.Dropdown):
        control.value = generator.choice([value for _, value in control._options_full])
    elif isinstance(control, ipywidgets.SelectMultiple):
        options = list(control.options)
        control.value = generator.sample(options, generator.randint(1, len(options)))
    elif isinstance(control, ipywidgets.FloatLogSlider):
        control.value = control.base ** generator.uniform(control.min, control.max)
    elif isinstance(control, ipywidgets.IntSlider):
        control.value = generator.randint(control.min, control.max)
    elif isinstance(control, ipywidgets.FloatSlider):
        control.value = generator.choice([control.min, control.max, generator.uniform(control.min, control.max)])
    elif texts:
        control.value = generator.choice(texts)
    else:
        raise AssertionError(f"no way to move {control}")


def plain(figure):
    """A figure as data in which arrays can be compared."""

    def simple(value):
        if isinstance(value, dict):
            return {key: simple(own) for key, own in value.items() if key not in ("uid", "template")}
        if isinstance(value, list | tuple | np.ndarray):
            return [simple(own) for own in value]
        return value.item() if isinstance(value, np.generic) else value

    document = figure.to_dict()
    return {"data": simple(document["data"]), "layout": simple(document["layout"])}


def recreated(explorer):
    """The names that the copied code leaves, run in an empty script."""
    names = {}
    exec(compile(explorer.source, "copied", "exec"), names)
    return names


def wander(explorer, moves, *, seed=0, texts=None, check=None):
    """``moves`` random moves; after each there is a new figure, and at every fourth it is that of this very state.

    Of this state: as the explorer's function gives it now, and, more rarely, as the copied code makes it by itself,
    which shares nothing with the widgets. Every control has been moved in the end. ``texts`` by control's name.
    """
    generator = random.Random(seed)
    names = list(explorer.controls)
    moved = set()
    for count in range(moves):
        name = names[count] if count < len(names) else generator.choice(names)  # each of them once, then any
        before, was = explorer.figure, explorer.state
        move(explorer.controls[name], generator, (texts or {}).get(name, ()))
        assert explorer.error is None, f"{name}: {explorer.error}"
        assert explorer.said.value == ""
        assert explorer.figure in explorer.children
        assert before is explorer.figure or before not in explorer.children
        if explorer.state != was:
            assert explorer.figure is not before, f"{name}: a stale figure"
            moved.add(name)
        if count % 4 == 0:
            shown = explorer._show(explorer.state)
            assert plain(explorer.figure) == plain(shown.figure), f"{name}: the figure is not of this state"
            assert explorer.below.value == shown.html
            if check is not None:
                check(explorer)
        if count % 25 == 0:
            assert plain(recreated(explorer)["figure"]) == plain(explorer.figure), f"{name}: other than the copied code"
    fixed = {name for name, only in (texts or {}).items() if len(set(only)) < 2}
    assert moved >= set(names) - fixed
