"""Items answered through the cache: the same one by one, in batches and after an interruption."""

import pytest
import torch

from diffkv_repro.cache import FullPrecision, Uniform, compress
from diffkv_repro.evaluation import generation, workers
from diffkv_repro.evaluation.decoding import Row, hold_back, left_padded, score
from diffkv_repro.evaluation.generation import run_tasks, run_tasks_of
from diffkv_repro.evaluation.methods import make_method, methods
from diffkv_repro.evaluation.teacher_forced import NotReadError
from diffkv_repro.models import load_model
from diffkv_repro.workloads.tasks import Item
from tests.tiny import save, tiny_llama

POLICY = make_method(window=4, alpha_high=2, alpha_low=0.5)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(str(save(tiny_llama(), tmp_path_factory.mktemp("model"))), device="cpu")


@pytest.fixture(scope="module")
def items(loaded):
    torch.manual_seed(0)
    made = []
    for length in (30, 12, 21, 7, 1):
        ids = torch.randint(3, 97, (1, length))
        prompt = loaded.tokenizer.decode(ids[0])
        expected = loaded.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, length:]
        made.append(Item("made", prompt, loaded.tokenizer.decode(expected, skip_special_tokens=True), "line", 6))
    return made


def test_full_precision_writes_what_the_model_writes(loaded, items):
    for min_decoded in (0, 1, 5):
        results = run_tasks(loaded, items, FullPrecision(), min_decoded=min_decoded)
        assert all(result.correct for result in results)
        assert [result.tokens for result in results] == [30, 12, 21, 7, 1]
    assert {result.nominal for result in results} == {1.0}


@pytest.mark.parametrize("method", [Uniform("K2V2"), POLICY], ids=["uniform", "policy"])
def test_batches_and_both_storages_change_nothing(loaded, items, method):
    single = run_tasks(loaded, items[:4], method, storage="packed")
    batched = run_tasks(loaded, items[:4], method, batch_size=3)
    assert [result.text for result in single] == [result.text for result in batched]
    assert [result.tokens for result in single] == [result.tokens for result in batched]
    assert all(result.reads >= 3 * 5 for result in single)  # three layers
    assert all(0 < result.nominal < min(1, result.true) for result in single)


def test_the_first_token_of_the_answer_has_read_the_cache(loaded, items):
    exact = run_tasks(loaded, items[:4], Uniform("K1V1"), min_decoded=0, max_new_tokens=1)
    read = run_tasks(loaded, items[:4], Uniform("K1V1"), max_new_tokens=1)
    first = [item.answer.split()[0] for item in items[:4]]
    assert [result.text for result in exact] == first
    assert {result.reads for result in exact} == {0}
    assert [result.text for result in read] != first
    assert {result.reads for result in read} == {3}


def test_finished_items_are_not_run_again(loaded, items, tmp_path, monkeypatch):
    whole = run_tasks(loaded, items, POLICY)
    calls = []

    def failing(session, loaded, requests, min_decoded, real=generation._generate):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(len(requests))
        return real(session, loaded, requests, min_decoded)

    monkeypatch.setattr(generation, "_generate", failing)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(loaded, items, POLICY, finished=tmp_path / "done.db")
    calls.clear()
    assert run_tasks(loaded, items, POLICY, finished=tmp_path / "done.db") == whole
    assert calls == [1, 1]
    calls.clear()
    assert run_tasks(loaded, items, POLICY, finished=tmp_path / "done.db", batch_size=3) == whole
    assert calls == []
    run_tasks(loaded, items, FullPrecision(), finished=tmp_path / "done.db", batch_size=3)
    assert sum(calls) == 5


def refuse(*_arguments):
    raise AssertionError("answered again")


def test_many_methods_in_processes_give_what_each_gives_alone(loaded, items, tmp_path, monkeypatch):
    asked = {"exact": FullPrecision(), "coarse": Uniform("K2V2"), "policy": POLICY}
    alone = {name: run_tasks(loaded, items, method, batch_size=3) for name, method in asked.items()}
    assert run_tasks_of(loaded, items, asked, batch_size=3, workers=1) == alone
    monkeypatch.setattr(workers, "_WORTH_WORKERS", 0)
    monkeypatch.setattr(generation, "_generate", refuse)  # in this process; the others import their own
    store = tmp_path / "done.db"
    assert run_tasks_of(loaded, items, asked, batch_size=3, finished=store, workers=2) == alone
    assert run_tasks_of(loaded, items, asked, finished=store, workers=2) == alone
    assert run_tasks(loaded, items, POLICY, finished=store) == alone["policy"]
    with pytest.raises(AssertionError, match="answered again"):
        run_tasks_of(loaded, items, asked, finished=store, min_decoded=0, workers=1)


def test_batches_are_those_of_the_device(loaded, items, monkeypatch):
    seen, real = [], generation._generate

    def counting(session, loaded, requests, min_decoded):
        seen.append(len(requests))
        return real(session, loaded, requests, min_decoded)

    monkeypatch.setattr(generation, "_generate", counting)
    run_tasks_of(loaded, items * 2, {"exact": FullPrecision()})
    assert seen == [8, 2]


def test_refusals(loaded, items):
    with pytest.raises(ValueError, match="batch_size is 0, min_decoded 1"):
        run_tasks(loaded, items, POLICY, batch_size=0)
    with pytest.raises(ValueError, match="batch_size is 0, min_decoded 1"):
        run_tasks_of(loaded, items, {"policy": POLICY}, batch_size=0)
    with pytest.raises(ValueError, match="6 of 5 tokens cannot be scored"):
        Row([1] * 5, scored=6, decoded=1)
    with pytest.raises(ValueError, match="4 of 4 inputs cannot be decoded"):
        Row([1] * 5, scored=1, decoded=4)
    with compress(loaded.model, POLICY) as session:
        with pytest.raises(ValueError, match=r"rows of one batch decode \[1, 2\] tokens"):
            score(session, loaded.model, [Row([1] * 5, 1, 1), Row([1] * 5, 1, 2)])
        with pytest.raises(NotReadError, match="0 reads of the compressed cache where 3 were due"):
            score(session, loaded.model, [Row([1] * 5, 1, 0)])


def test_scores_are_those_of_one_forward_call(loaded):
    torch.manual_seed(1)
    rows = [torch.randint(3, 97, (length,)) for length in (150, 200, 170)]  # more than one call decodes at once
    expected = []
    for row in rows:
        logprobs = loaded.model(row[None]).logits[0, :-1].log_softmax(dim=-1)
        expected.append(logprobs.gather(-1, row[1:, None])[:, 0])
    for scored, decoded in ((1, 1), (3, 5), (9, 4), (140, 145), (140, 30)):
        with compress(loaded.model, FullPrecision()) as session:
            found, use = score(session, loaded.model, [Row(row.tolist(), scored, decoded) for row in rows])
        assert use.reads == 3 * decoded
        for each, exact, row in zip(found, expected, rows, strict=True):
            torch.testing.assert_close(each.logprobs, exact[-scored:], atol=1e-5, rtol=1e-5)
            assert each.logprobs[-1] == each.last[row[-1]]


@pytest.mark.parametrize("name", methods())
def test_a_prompt_that_rows_share_is_prefilled_once(loaded, name):
    torch.manual_seed(2)
    prompt, *ends = torch.randint(3, 97, (4, 40)).tolist()
    rows = [Row(prompt + end[:4], 4, 5) for end in ends]
    made = make_method(name, loaded, **({"length": 32} if name == "duoattention" else {}))
    for storage in ("packed", "simulated"):
        with compress(loaded.model, made, storage=storage) as session:
            together, use = score(session, loaded.model, rows)
            alone = [score(session, loaded.model, [row]) for row in rows]
        assert use.reads == alone[0][1].reads
        assert use.nominal == pytest.approx(sum(one.nominal for _, one in alone) / 3)
        for found, ([expected], _) in zip(together, alone, strict=True):
            torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


def test_held_back_tokens_leave_each_prompt_its_first(loaded):
    ids, mask = left_padded([[5, 6, 7], [8]], 0, loaded.device)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    with compress(loaded.model, FullPrecision()) as session:
        assert hold_back(session, loaded.model, ids, mask, 2).columns == 0
        assert hold_back(session, loaded.model, ids[:1], mask[:1], 5).columns == 1
