"""Quality of profiles: equal to asking each alone, relative to the uncompressed run, kept, with honest intervals."""

import math
import random

import pandas as pd
import pytest
import torch

from diffkv_repro.evaluation import profile_quality
from diffkv_repro.evaluation.generation import run_tasks
from diffkv_repro.evaluation.methods import make_method
from diffkv_repro.evaluation.profile_quality import COLUMNS, Workload, judge_profiles, summarise
from diffkv_repro.kvserve import Profile
from diffkv_repro.kvserve.quality import Judge
from diffkv_repro.models import load_model
from diffkv_repro.workloads.tasks import Item
from tests.cache_helpers import ids_of
from tests.evaluation.test_lm_eval_model import folder  # noqa: F401 (a fixture)

COARSE = "none | uniform K3 V3 | ans"


@pytest.fixture(scope="module")
def loaded(folder):  # noqa: F811
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def methods(loaded):
    lines = {"none": "none", "coarse": COARSE, "snapkv": "none | tokens 0.5:16bit 0.5:0 recent=4 | none"}
    return {name: make_method("kvserve", loaded, profile=line) for name, line in lines.items()}


@pytest.fixture(scope="module")
def asked(loaded):
    """Items whose answers are what the uncompressed model says, but for every third one."""
    rng = random.Random(0)
    prompts = [" ".join(f"w{rng.randrange(3, 97)}" for _ in range(length)) for length in (30, 12, 21, 25, 9, 40, 33)]
    items = [Item("made", prompt, "", "line", 5) for prompt in prompts]
    said = [result.text for result in run_tasks(loaded, items, make_method("kvserve", loaded, profile="none"))]
    answers = [text.strip() if index % 3 else "w0 w0" for index, text in enumerate(said)]
    return tuple(Item("made", prompt, answer, "line", 5) for prompt, answer in zip(prompts, answers, strict=True))


def test_tasks_are_scored_as_if_each_item_were_alone(loaded, methods, asked):
    workload = Workload("made", items=asked)
    judged = judge_profiles(loaded, [workload], methods, batch_size=3)
    assert tuple(judged.columns) == COLUMNS
    assert len(judged) == len(asked) * len(methods)
    assert (judged["reads"] > 0).all()
    for name, method in methods.items():
        own = judged[judged["profile"] == name]
        alone = run_tasks(loaded, asked, method)
        assert own["item"].tolist() == list(range(len(asked)))
        assert own["score"].tolist() == [float(result.correct) for result in alone]
        assert own["plain"].tolist() == [float(bool(index % 3)) for index in range(len(asked))]
        assert own["tokens"].tolist() == [result.tokens for result in alone]
    one = judge_profiles(loaded, [workload], methods, batch_size=1)
    assert one["score"].tolist() == judged["score"].tolist()
    assert one["kl"].tolist() == pytest.approx(judged["kl"].tolist(), abs=1e-4)
    assert one["agreement"].tolist() == judged["agreement"].tolist()
    none, coarse = (judged[judged["profile"] == name] for name in ("none", "coarse"))
    assert none["kl"].max() < 1e-3 < coarse["kl"].mean()
    assert (none["agreement"] == 1).all()
    assert coarse["score"].sum() < coarse["plain"].sum()
    table = summarise(judged, [workload]).set_index("profile")
    assert table.loc["none", ["relative", "low", "high"]].tolist() == [1, 1, 1]
    assert table.loc["coarse", "low"] <= table.loc["coarse", "relative"] < 1
    assert table.loc["coarse", "ratio"] > table.loc["none", "ratio"]
    assert (table["n"] == len(asked)).all()


def test_texts_are_scored_as_the_judge_of_likelihood_does(loaded, methods):
    ids = [ids_of(50, seed=seed) for seed in range(3)]
    workload = Workload("prose", texts=tuple(ids), continuation=12)
    judged = judge_profiles(loaded, [workload], {"coarse": methods["coarse"]}, batch_size=2)
    judge = Judge(loaded, ids, continuation=12)
    expected = judge.judge(Profile.parse(COARSE))
    # The judge sends the whole prompt and asks its last token again; here that one is held back.
    assert (judged["plain"] - judged["score"]).mean() == pytest.approx(expected.added_nll, abs=0.1)
    with torch.inference_mode():
        whole = torch.log_softmax(loaded.model(ids[1]).logits[0].float(), -1)
    nll = whole[37:49].gather(1, ids[1][0, 38:, None]).mean()
    assert judged["plain"][1] == pytest.approx(float(nll), abs=1e-4)
    table = summarise(judged, [workload])
    assert table["relative"][0] == pytest.approx(math.exp((judged["score"] - judged["plain"]).mean()))
    assert table["low"][0] <= table["relative"][0] <= table["high"][0]


def test_what_was_judged_is_not_judged_again(loaded, methods, asked, tmp_path, monkeypatch):
    workload = Workload("made", items=asked[:4])
    kept = tmp_path / "judged.sqlite"
    few = {name: methods[name] for name in ("none", "coarse")}
    first = judge_profiles(loaded, [workload], few, batch_size=3, finished=kept)
    calls = []
    real = profile_quality._judge
    monkeypatch.setattr(profile_quality, "_judge", lambda model, job: calls.append(job) or real(model, job))
    again = judge_profiles(loaded, [workload], few, batch_size=3, finished=kept)
    assert not calls
    pd.testing.assert_frame_equal(first, again)
    more = judge_profiles(loaded, [workload], methods, batch_size=3, finished=kept)
    assert [list(job.methods) for job in calls] == [["snapkv"], ["snapkv"]]
    assert len(more) == 12


def test_intervals_resample_the_uncompressed_run_too():
    rows = [
        {"workload": "made", "profile": "p", "item": index, "score": score, "plain": plain, "ratio": ratio,
         "kl": 0.1, "agreement": 1.0, "tokens": 9, "reads": 1}
        for index, (score, plain, ratio) in enumerate([(1, 1, 2.0), (0, 0, 2.0), (1, 1, 6.0), (0, 0, 6.0)] * 10)
    ]  # fmt: skip
    (found,) = summarise(pd.DataFrame(rows), []).to_dict("records")
    assert found["relative"] == found["low"] == found["high"] == pytest.approx(1)  # equal on every item
    assert (found["score"], found["n"]) == (0.5, 40)
    assert found["ratio"] == pytest.approx(3)  # bytes over bytes, not a mean of quotients
    worse = [row | {"score": row["score"] * (row["item"] % 8 != 0)} for row in rows]
    (found,) = summarise(pd.DataFrame(worse), []).to_dict("records")
    assert found["relative"] == pytest.approx(0.75)
    assert found["low"] < 0.75 < found["high"] < 1
    assert summarise(pd.DataFrame([row | {"plain": 0} for row in rows]), []).empty


def test_what_cannot_be_judged_is_refused(loaded, methods, asked):
    with pytest.raises(ValueError, match="workload x has 0 items and 0 texts"):
        Workload("x")
    with pytest.raises(ValueError, match="workload x has 7 items and 1 texts"):
        Workload("x", items=asked, texts=(ids_of(9),))
    for texts, continuation in (((ids_of(9), ids_of(8)), 2), ((ids_of(9),), 8), ((ids_of(9),), 0)):
        with pytest.raises(ValueError, match="they must agree, and leave a prompt"):
            Workload("x", texts=texts, continuation=continuation)
    with pytest.raises(ValueError, match="batch_size is 0 and there are 3 methods"):
        judge_profiles(loaded, [Workload("x", items=asked)], methods, batch_size=0)
    with pytest.raises(ValueError, match="there are 0 methods"):
        judge_profiles(loaded, [Workload("x", items=asked)], {})
