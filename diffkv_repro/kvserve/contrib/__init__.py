"""Parts of profiles with a file of their own: every module in this folder is imported, and registers what it holds.

A part that is not to live in this repository registers itself too, as soon as its own module is imported. An installed
package names that module in its entry points, group ``diffkv_repro.parts``, and it is imported here.
"""

import importlib
import pkgutil
from importlib.metadata import entry_points

GROUP = "diffkv_repro.parts"


def register() -> list[str]:
    """Import every module of this folder and of the entry points; returns their names."""
    own = [module.name for module in pkgutil.iter_modules(__path__, f"{__name__}.")]
    for name in own:
        importlib.import_module(name)
    others = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    for entry in others:
        entry.load()
    return own + [entry.value for entry in others]
