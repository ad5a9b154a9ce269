"""Generated tasks: reproducible, solvable from the prompt, scored by the answer alone."""

import json
import re

import pytest
import yaml

from diffkv_repro.workloads.lm_eval_tasks import TAG, write_lm_eval_tasks
from diffkv_repro.workloads.tasks import (
    TASKS,
    WORDS,
    Item,
    arithmetic,
    copy,
    facts,
    make_items,
    passkey,
    recall,
    uuid_recall,
)


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_decides(task):
    first = make_items(task, 4, seed=1)
    assert first == make_items(task, 4, seed=1)
    assert first[:2] == make_items(task, 2, seed=1)
    assert first != make_items(task, 4, seed=2)
    assert len({item.prompt for item in first}) == 4
    assert {item.task for item in first} == {task}


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_is_right_and_others_are_not(task):
    for item in make_items(task, 5):
        assert item.correct(f" {item.answer}\n\nand so on, 12")
        assert not item.correct("")
        assert not item.correct(" 7777777")
        assert not item.correct(f" no {item.answer[:-1]}")


def test_recall_asks_for_a_word_of_its_list():
    for item in recall(10, pairs=9, examples=2):
        table, again = item.prompt.split("\n\nAgain:\n")
        numbers = dict(line.split(": ") for line in table.splitlines())
        *shown, asked = again.splitlines()
        assert len(numbers) == len(set(numbers.values())) == 9
        assert numbers[asked.removesuffix(":")] == item.answer
        assert [numbers[line.split(": ")[0]] for line in shown] == [line.split(": ")[1] for line in shown]
        assert item.answer in item.choices
        assert len(set(item.choices)) == 4
        assert set(item.choices) <= set(numbers.values())
    assert not any(one != other and other.startswith(one) for one in WORDS for other in WORDS)


def test_uuid_recall_holds_the_key_once_more_than_the_others():
    for item in uuid_recall(5, keys=3):
        table = json.loads(re.search(r"\{.*\}", item.prompt, re.DOTALL).group())
        assert table[re.search(r'Key: "(.*)"', item.prompt).group(1)] == item.answer
        assert len(table) == 3


def test_facts_ask_for_something_that_is_told_once():
    for item in facts(20, people=4, examples=2):
        text, questions = item.prompt.split("\n\n")
        assert len(re.findall(rf"\b{item.answer}\b", text)) == 1
        *solved, asked, last = questions.splitlines()
        assert last == "Answer:"
        assert asked not in solved
        (name,) = {
            word
            for word in asked.rstrip("?").split()
            if word[0].isupper() and word not in ("Question:", "Where", "What")
        }
        sentence = next(part for part in text.split(".") if re.search(rf"\b{item.answer}\b", part))
        assert sentence.split()[0] == name


def test_passkey_is_as_long_as_asked_and_anywhere():
    items = passkey(30, words=200)
    places = [item.prompt.index(item.answer) / len(item.prompt) for item in items]
    assert min(places) < 0.2
    assert max(places) > 0.8
    assert all(190 < len(item.prompt.split()) < 240 for item in items)


def test_sums_are_right_and_lists_repeat():
    for item in arithmetic(20, examples=2, largest=9):
        first, second = map(int, re.findall(r"\d+", item.prompt.split("Question: ")[-1]))
        assert item.answer == str(first + second if "more" in item.prompt.split("Question: ")[-1] else first - second)
        assert item.prompt.count("Answer: ") == 2
    for item in copy(5, words=3):
        assert item.prompt.endswith(f"List: {item.answer}\nCopy:")
        assert item.correct(f" {item.answer}\nList: more")
        assert not item.correct(f" {item.answer}, apple")


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("recal", {}, "unknown task 'recal'; allowed are recall, uuid_recall"),
        ("recall", {"pairs": 3}, "pairs is 3; allowed are 4 to 135"),
        ("recall", {"pairs": 136}, "pairs is 136; allowed are 4 to 135"),
        ("uuid_recall", {"keys": 0}, "keys is 0; allowed are 1 to"),
        ("passkey", {"words": 5}, "words is 5; allowed are 20 to"),
        ("arithmetic", {"largest": 1}, "largest is 1; allowed are 2 to"),
        ("copy", {"words": 1}, "words is 1; allowed are 2 to"),
    ],
)
def test_sizes_that_cannot_be(task, options, message):
    with pytest.raises(ValueError, match=message):
        make_items(task, 2, **options)
    with pytest.raises(ValueError, match="count is 0"):
        recall(0)
    with pytest.raises(ValueError, match="kind is 'phrase'"):
        Item("t", "p", "a", "phrase", 1)


def test_files_for_lm_eval(tmp_path):
    names = write_lm_eval_tasks(tmp_path / "tasks", documents=3, pairs=6, words=50)
    assert names == ["diffkv_recall", "diffkv_recall_choice", "diffkv_passkey"]
    for name in names:
        task = yaml.safe_load((tmp_path / "tasks" / f"{name}.yaml").read_text())
        assert (task["task"], task["tag"], task["test_split"]) == (name, TAG, "test")
        rows = (tmp_path / "tasks" / f"{name}.jsonl").read_text().splitlines()
        assert task["dataset_kwargs"]["data_files"] == {"test": str(tmp_path / "tasks" / f"{name}.jsonl")}
        assert len(rows) == 3
        for row in map(json.loads, rows):
            assert "choices" not in row or row["choices"][row["label"]] == row["answer"]
    with pytest.raises(ValueError, match="pairs is 2"):
        write_lm_eval_tasks(tmp_path / "other", pairs=2)
    assert not (tmp_path / "other").exists()
