"""What notebooks 09 and 10 measure: workloads that a small model has a signal on, static methods, and combinations."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from diffkv_repro.evaluation.profile_quality import Workload
from diffkv_repro.evaluation.transferred import Transferred, assets_for, layout_of
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.models import LoadedModel
from diffkv_repro.workloads.tasks import make_items


def workloads(
    texts: Mapping[str, Sequence[Tensor]],
    *,
    n_items: int,
    continuation: int,
    passkey_words: int = 450,
    seed: int = 0,
) -> list[Workload]:
    """Four tasks of ``n_items`` each (half as many of the long ones) and the given texts, token ids by name."""
    few = max(1, n_items // 2)
    tasks = [
        Workload("recall", items=tuple(make_items("recall", n_items, seed=seed))),
        Workload("pass key", items=tuple(make_items("passkey", few, words=passkey_words, seed=seed))),
        Workload("copy", items=tuple(make_items("copy", n_items, words=5, seed=seed))),
        Workload("facts", items=tuple(make_items("facts", n_items, seed=seed))),
    ]
    return tasks + [Workload(name, texts=tuple(own), continuation=continuation) for name, own in texts.items()]


def methods_of(loaded: LoadedModel, profiles: Iterable[str]) -> dict[str, Transferred]:
    """Profiles, by name or as lines, with what they share of the model computed once."""
    chosen = {name: Profile.parse(name) for name in profiles}
    assets, layout = assets_for(loaded, *chosen.values()), layout_of(loaded)
    return {
        name: Transferred(profile, layout, assets, "" if str(profile) == name else name)
        for name, profile in chosen.items()
    }
