"""Generated tasks with an exact answer, for small models: no download, the same items for the same seed.

All are plain text to be continued, without a chat template: a model of 135 million parameters continues a pattern
better than it follows an instruction. SmolLM2, uncompressed, on 40 items of ``recall`` with 20 pairs: 0.75 right this
way, 0.18 when its template asks "What is the number of ...?".
"""

import json
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

# Common words, none of them the beginning of another.
_NOUNS = (
    "acorn almond anchor apple arrow badger balloon bamboo banner barrel basket beaver bicycle biscuit blanket "
    "bottle bridge bucket button cactus camera candle canoe canyon carpet carrot castle cellar chapel cherry "
    "chimney clover coffee copper cotton cradle curtain cushion daisy desert dolphin donkey drawer eagle engine "
    "falcon feather fiddle forest fountain garden giraffe goblet guitar hammer harbor hazel helmet igloo island "
    "jacket jungle kettle kitten ladder ladle lantern lemon lizard locket magnet mango maple marble meadow mirror "
    "monkey mushroom needle orange oyster paddle palace parrot peanut pencil penguin pepper piano pigeon pillar "
    "pillow pirate planet pocket pumpkin puzzle rabbit raven ribbon river rocket saddle saffron salmon sandal "
    "saucer shelter shovel silver sparrow spider squirrel stone sugar teapot temple thunder ticket tiger tomato "
    "towel tractor trumpet tunnel turtle valley violin vulture wagon wallet walnut whistle window winter"
)
WORDS = tuple(_NOUNS.split())

# Where the answer is in a continuation; also used by the lm-eval tasks.
PATTERNS = {
    "number": r"-?\d+",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "line": r"[^\s][^\n]*[^\s]",
    "word": r"[A-Za-z]+",
}

_NAMES = "Anna Ben Clara David Emma Frank Grace Henry Ivan Julia Kate Leo Mary Nick Olga Paul"
# What can be told of somebody, and asked: a sentence, a question, its possible answers.
_CITIES = "Paris London Berlin Madrid Rome Vienna Oslo Dublin Prague Lisbon Athens Moscow Tokyo Cairo Delhi Boston"
_JOBS = "doctor teacher painter lawyer farmer baker pilot singer nurse writer plumber judge dancer waiter chef sailor"
_ANIMALS = "dog cat horse rabbit parrot goat pig sheep duck snake turtle hamster cow mouse fish donkey"
_FACTS = (
    ("{name} lives in {answer}.", "Where does {name} live?", _CITIES),
    ("{name} works as a {answer}.", "What does {name} work as?", _JOBS),
    ("{name} has a {answer}.", "What animal does {name} have?", _ANIMALS),
)

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True)
class Item:
    """A ``prompt`` to be continued by at most ``max_new_tokens``; right where the first ``kind`` of answer in the
    continuation is ``answer``. ``choices`` are there for items that can also be asked as a multiple choice."""

    task: str
    prompt: str
    answer: str
    kind: str
    max_new_tokens: int
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in PATTERNS:
            raise ValueError(f"kind is {self.kind!r}; allowed are {', '.join(PATTERNS)}")

    def correct(self, continuation: str) -> bool:
        """Whether ``continuation`` begins with the answer, or has it as its first number or UUID."""
        found = re.search(PATTERNS[self.kind], continuation)
        return found is not None and found.group() == self.answer


def recall(count: int, *, pairs: int = 20, examples: int = 0, choices: int = 4, seed: int = 0) -> list[Item]:
    """A list of words with numbers of three digits, then one of the words again: which number has it?

    ``examples`` other words are repeated with their numbers first, which makes it easier. ``choices`` are numbers
    of the same list. About 8 tokens a pair.
    """
    _require("pairs", pairs, examples + choices, len(WORDS))
    rng = random.Random(f"recall {pairs} {examples} {choices} {seed}")
    items = []
    for _ in range(_count(count)):
        table = list(zip(rng.sample(WORDS, pairs), rng.sample(range(100, 1000), pairs), strict=True))
        asked, *others = rng.sample(table, max(choices, 1))
        shown = rng.sample([pair for pair in table if pair != asked], examples)
        lines = [f"{word}: {number}" for word, number in table]
        again = [f"{word}: {number}" for word, number in shown]
        prompt = "\n".join([*lines, "", "Again:", *again, f"{asked[0]}:"])
        numbers = [str(number) for _, number in (asked, *others)]
        offered = tuple(rng.sample(numbers, len(numbers)))
        items.append(Item("recall", prompt, numbers[0], "number", 6, offered))
    return items


def uuid_recall(count: int, *, keys: int = 5, seed: int = 0) -> list[Item]:
    """A JSON object from UUIDs to UUIDs, and one of its keys (Liu et al., 2023). About 80 tokens a key."""
    _require("keys", keys, 1, 1000)
    rng = random.Random(f"uuid_recall {keys} {seed}")
    items = []
    for _ in range(_count(count)):
        table = {_uuid(rng): _uuid(rng) for _ in range(keys)}
        asked = rng.choice(list(table))
        prompt = (
            "Extract the value corresponding to the specified key in the JSON object below.\n\n"
            f'JSON data:\n{json.dumps(table, indent=0)}\n\nKey: "{asked}"\nCorresponding value: "'
        )
        items.append(Item("uuid_recall", prompt, table[asked], "uuid", 48))
    return items


def passkey(count: int, *, words: int = 400, seed: int = 0) -> list[Item]:
    """A number of five digits somewhere in ``words`` words of filler. About 1.3 tokens a word."""
    _require("words", words, 20, 1_000_000)
    rng = random.Random(f"passkey {words} {seed}")
    sentences = _FILLER.split(". ")
    filler = [f"{sentences[index % (len(sentences) - 1)]}." for index in range(words // 4 + 1)]
    items = []
    for _ in range(_count(count)):
        key = str(rng.randrange(10_000, 100_000))
        at = rng.randrange(len(filler) + 1)
        text = [*filler[:at], f"The pass key is {key}. Remember it. {key} is the pass key.", *filler[at:]]
        prompt = f"There is a pass key hidden in this text.\n{' '.join(text)}\nWhat is the pass key? The pass key is"
        items.append(Item("passkey", prompt, key, "number", 8))
    return items


def arithmetic(count: int, *, examples: int = 4, largest: int = 50, seed: int = 0) -> list[Item]:
    """Sums and differences of two numbers up to ``largest``, in words, after ``examples`` solved ones."""
    _require("largest", largest, 2, 10_000)
    _require("examples", examples, 0, 50)
    rng = random.Random(f"arithmetic {examples} {largest} {seed}")
    items = []
    for _ in range(_count(count)):
        problems = [_problem(rng, largest) for _ in range(examples + 1)]
        solved = "".join(f"Question: {text}\nAnswer: {answer}\n\n" for text, answer in problems[:-1])
        text, answer = problems[-1]
        items.append(Item("arithmetic", f"{solved}Question: {text}\nAnswer:", str(answer), "number", 6))
    return items


def copy(count: int, *, words: int = 10, examples: int = 2, seed: int = 0) -> list[Item]:
    """A list of ``words`` words, to be written once more, after ``examples`` lists that were."""
    _require("words", words, 2, len(WORDS))
    _require("examples", examples, 0, 20)
    rng = random.Random(f"copy {words} {examples} {seed}")
    items = []
    for _ in range(_count(count)):
        lists = [", ".join(rng.sample(WORDS, words)) for _ in range(examples + 1)]
        solved = "".join(f"List: {text}\nCopy: {text}\n\n" for text in lists[:-1])
        items.append(Item("copy", f"{solved}List: {lists[-1]}\nCopy:", lists[-1], "line", 4 * words))
    return items


def facts(count: int, *, people: int = 3, examples: int = 3, seed: int = 0) -> list[Item]:
    """Three facts about each of ``people`` in plain sentences, and a question about one of them.

    ``examples`` questions about other facts of the same text are answered first. About 20 tokens a person.
    """
    known = _NAMES.split()
    _require("people", people, 2, len(known))
    _require("examples", examples, 0, 3 * people - 1)
    rng = random.Random(f"facts {people} {examples} {seed}")
    items = []
    for _ in range(_count(count)):
        names = rng.sample(known, people)
        told = [
            (name, sentence, question, answer)
            for sentence, question, answers in _FACTS
            for name, answer in zip(names, rng.sample(answers.split(), people), strict=True)
        ]
        rng.shuffle(told)
        text = " ".join(sentence.format(name=name, answer=answer) for name, sentence, _, answer in told)
        *shown, asked = rng.sample(told, examples + 1)
        solved = "".join(f"Question: {ask.format(name=name)}\nAnswer: {answer}\n" for name, _, ask, answer in shown)
        question = f"Question: {asked[2].format(name=asked[0])}\nAnswer:"
        items.append(Item("facts", f"{text}\n\n{solved}{question}", asked[3], "word", 5))
    return items


TASKS: dict[str, Callable[..., list[Item]]] = {
    "recall": recall, "uuid_recall": uuid_recall, "passkey": passkey, "arithmetic": arithmetic, "copy": copy,
    "facts": facts,
}  # fmt: skip


def make_items(task: str, count: int, **options: int) -> list[Item]:
    """``count`` items of the task called ``task``. Raises ValueError for an unknown task or sizes it cannot have."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; allowed are {', '.join(TASKS)}")
    return TASKS[task](count, **options)


def _problem(rng: random.Random, largest: int) -> tuple[str, int]:
    name, thing = rng.choice(("Anna", "Ben", "Clara", "David")), rng.choice(("apples", "books", "coins", "stamps"))
    first, second = sorted((rng.randint(1, largest), rng.randint(1, largest)), reverse=True)
    if rng.random() < 0.5:
        return f"{name} has {first} {thing} and gets {second} more. How many {thing} has {name} now?", first + second
    return f"{name} has {first} {thing} and gives {second} away. How many {thing} are left?", first - second


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _count(count: int) -> int:
    return _require("count", count, 1, 1_000_000)


def _require(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; allowed are {least} to {most}")
    return value
