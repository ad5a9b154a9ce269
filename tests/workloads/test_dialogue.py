"""Dialogues of the manual, and windows of several sources at once."""

import re

import pytest
from tiny import save_tokenizer
from transformers import PreTrainedTokenizerFast

from diffkv_repro.workloads import TextError, digest, load_texts, load_windows, source_names, windows

TURN = re.compile(r"<\|im_start\|>user\n(.+?)<\|im_end\|>\n<\|im_start\|>assistant\n(.+?)<\|im_end\|>\n", re.DOTALL)


@pytest.fixture
def tokenizer(tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    return PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")


def folder_of(path, seed):
    path.mkdir(parents=True)
    for index in range(3):
        start = 7 * index + seed
        (path / f"{index}.txt").write_text(" ".join(f"w{3 + (start + step) % 90}" for step in range(60)))
    return str(path)


def test_dialogues_are_plenty_and_always_the_same():
    documents = load_texts("dialogue")
    assert len(documents) >= 6
    assert documents == load_texts("dialogue")
    assert len({document.name for document in documents}) == len(documents)
    assert len({document.text for document in documents}) == len(documents)
    assert min(len(document.text) for document in documents) > 1000


def test_each_dialogue_is_eight_questions_with_their_answers():
    for document in load_texts("dialogue"):
        turns = TURN.findall(document.text)
        assert len(turns) == 8
        assert TURN.sub("", document.text) == "", "nothing outside the markup"
        for question, answer in turns:
            assert re.fullmatch(r"What should I know about .+ \(.+\) in Python\?", question)
            assert answer.strip()
            assert "<|im" not in question + answer


def test_the_refusal_of_an_unknown_source_offers_dialogue():
    with pytest.raises(TextError, match="allowed are prose, code, dialogue, wikitext"):
        load_texts("nothing-here")


def test_windows_of_several_sources_by_name(tmp_path, tokenizer):
    sources = [folder_of(tmp_path / "one", 0), folder_of(tmp_path / "two", 40)]
    found = load_windows(sources, tokenizer, count=4, tokens=20, seed=3)
    assert list(found) == ["one", "two"]
    for source, chosen in zip(sources, found.values(), strict=True):
        expected = windows(load_texts(source), tokenizer, count=4, tokens=20, seed=3)
        assert digest(chosen) == digest(expected)
        assert [window.label for window in chosen] == [window.label for window in expected]
        assert all(window.input_ids.shape == (1, 20) for window in chosen)
    assert digest(found["one"]) != digest(found["two"])
    assert source_names([*sources, "prose"]) == "one, two, prose"


def test_folders_of_one_name_both_count(tmp_path, tokenizer):
    sources = [folder_of(tmp_path / "a" / "texts", 0), folder_of(tmp_path / "b" / "texts", 40)]
    found = load_windows(sources, tokenizer, count=2, tokens=20)
    assert sum(map(len, found.values())) == 4


def test_a_source_that_is_too_short_is_refused(tmp_path, tokenizer):
    with pytest.raises(TextError, match="3 documents hold only 9 windows of 20 tokens, 10 are wanted"):
        load_windows([folder_of(tmp_path / "one", 0)], tokenizer, count=10, tokens=20)
