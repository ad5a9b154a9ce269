import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from diffkv_repro.workloads import Document, TextError, digest, load_texts, windows
from diffkv_repro.workloads.texts import _articles


def word_tokenizer(bos=False):
    words = {f"w{index}": index for index in range(500)} | {"<bos>": 500, "?": 501}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 500)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def numbered(start, count):
    return Document(f"from {start}", " ".join(f"w{index}" for index in range(start, start + count)))


@pytest.mark.parametrize("source", ["prose", "code"])
def test_bundled_texts_are_real_and_plenty(source):
    documents = load_texts(source)
    assert len(documents) > 50
    assert sum(len(document.text) for document in documents) > 400_000
    assert documents == load_texts(source)
    assert len({document.name for document in documents}) == len(documents)
    assert all(not document.name.startswith("/") for document in documents)


def test_a_folder_and_a_file(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "deep" / "a.md").write_text("öne", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert load_texts(str(tmp_path)) == [Document("b.txt", "two"), Document("deep/a.md", "öne")]
    assert load_texts(str(tmp_path / "b.txt")) == [Document("b.txt", "two")]


def test_a_data_set_through_datasets(tmp_path, monkeypatch):
    import datasets

    made = datasets.Dataset.from_dict({"text": [" = A = \n", "a1", "", " = = sub = = ", " = B = ", "b1"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *config, split: made)
    assert [d.text for d in load_texts("hub:some/set:train:text")][:2] == [" = A = \n", "a1"]
    assert [d.text for d in load_texts("wikitext")] == [" = A = \na1 = = sub = = ", " = B = b1"]
    with pytest.raises(TextError, match="some/set has no column 'body', only text"):
        load_texts("hub:some/set:train:body")


def test_articles_before_the_first_heading_are_kept_and_the_first_ones_taken():
    lines = [Document("x", text) for text in ("intro", " = T = ", "t1", " = U = ", "u1")]
    assert [d.text for d in _articles(lines, limit=9)] == ["intro", " = T = t1", " = U = u1"]
    assert [d.text for d in _articles(lines, limit=2)] == ["intro", " = T = t1"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing-here", "unknown text source 'nothing-here'; allowed are prose, code, dialogue, wikitext"),
        ("hub:only-a-name", "is not of the form hub:"),
        ("hub:no/such/set:train:text", "cannot be loaded"),
    ],
)
def test_bad_sources_are_named(source, message):
    with pytest.raises(TextError, match=message):
        load_texts(source)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TextError, match="holds no text"):
        load_texts(str(tmp_path))


DOCUMENTS = [numbered(0, 95), numbered(100, 40), numbered(200, 9), numbered(300, 31)]


def test_windows_do_not_overlap_and_come_from_all_documents_first():
    found = windows(DOCUMENTS, word_tokenizer(), count=12, tokens=10, seed=1)
    assert [window.input_ids.shape for window in found] == [torch.Size([1, 10])] * 12
    assert {window.document for window in found[:3]} == {"from 0", "from 100", "from 300"}, "9 tokens are too few"
    seen = torch.cat([window.input_ids[0] for window in found])
    assert len(seen.unique()) == 120
    for window in found:
        first = int(window.document.split()[1]) + window.start
        assert window.input_ids[0].tolist() == list(range(first, first + 10))


def test_the_seed_decides():
    def drawn(seed):
        return digest(windows(DOCUMENTS, word_tokenizer(), count=6, tokens=10, seed=seed))

    assert drawn(0) == drawn(0)
    assert len({drawn(seed) for seed in range(8)}) > 4


def test_special_tokens_open_every_window():
    found = windows(DOCUMENTS, word_tokenizer(bos=True), count=4, tokens=10)
    assert all(window.input_ids[0, 0] == 500 for window in found)
    assert all((window.input_ids[0, 1:] < 500).all() for window in found)


def test_too_little_text_is_counted():
    with pytest.raises(TextError, match="4 documents hold only 5 windows of 31 tokens, 9 are wanted"):
        windows(DOCUMENTS, word_tokenizer(), count=9, tokens=31)
    with pytest.raises(ValueError, match="count is 0 and tokens is 10"):
        windows(DOCUMENTS, word_tokenizer(), count=0, tokens=10)
