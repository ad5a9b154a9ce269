"""``load_texts``: real prose and code with no download, any folder of text files, any data set of the hub."""

import ast
import importlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diffkv_repro.core.errors import first_line

_SUFFIXES = {".txt", ".md", ".rst", ".py", ".json", ".jsonl"}
_MIN_CHARACTERS = 200
_WIKITEXT = "hub:Salesforce/wikitext:wikitext-103-raw-v1:train:text"
_ARTICLES = 1000  # the first thousand: DiffKV, Figures 2, 4 and 5


class TextError(ValueError):
    """A source of texts that does not exist, cannot be reached or is empty; the message says which."""


@dataclass(frozen=True)
class Document:
    """One text with the name of where it came from."""

    name: str
    text: str


def load_texts(source: str) -> list[Document]:
    """All documents of a source, in a fixed order.

    ``prose``: the reference manual that ships with the interpreter, and its standard library's long module
    and class docstrings. ``code``: the sources of that library. ``dialogue``: that manual as questions and answers,
    in the chat markup of SmolLM2 and Qwen. ``wikitext``: the first 1000 articles of WikiText-103.
    ``hub:<data set>[:<config>]:<split>:<column>``: through ``datasets``. Anything else: a text file, or a
    folder of them (searched recursively). Raises TextError naming the source and what is allowed.
    """
    if source == "prose":
        documents = _prose()
    elif source == "code":
        documents = _code()
    elif source == "dialogue":
        documents = _dialogue()
    elif source == "wikitext":
        documents = _articles(_hub(_WIKITEXT), _ARTICLES)
    elif source.startswith("hub:"):
        documents = list(_hub(source))
    else:
        documents = _files(source)
    if not documents:
        raise TextError(f"text source {source!r} holds no text")
    return documents


def source_name(source: str) -> str:
    """``source`` for a figure's face: a path without its folders, anything else as it is."""
    path = Path(source).expanduser()
    return path.name if path.exists() else source


def _prose() -> list[Document]:
    topics = importlib.import_module("pydoc_data.topics").topics
    manual = [Document(f"topic {name}", text) for name, text in sorted(topics.items())]
    docstrings = []
    for path in _library_files():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        nodes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
        text = "\n\n".join(found for node in nodes if (found := ast.get_docstring(node)))
        docstrings.append(Document(f"docstrings of {path.name}", text))
    return [document for document in manual + docstrings if len(document.text) >= _MIN_CHARACTERS]


_TURNS = 8  # questions and answers in one dialogue


def _dialogue() -> list[Document]:
    """Conversations about the manual's topics: a question naming one, its first paragraphs as the answer."""
    topics = importlib.import_module("pydoc_data.topics").topics
    turns = []
    for name, text in sorted(topics.items()):
        title, *paragraphs = [part.strip() for part in text.split("\n\n") if part.strip(" *=-~\n")]
        question = f"What should I know about {title.splitlines()[0].strip('*= ').lower()} ({name}) in Python?"
        answer = "\n\n".join(paragraphs[:3])
        if answer:
            turns.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n")
    return [
        Document(f"dialogue {start // _TURNS}", "".join(turns[start : start + _TURNS]))
        for start in range(0, len(turns) - _TURNS + 1, _TURNS)
    ]


def _code() -> list[Document]:
    documents = [Document(path.name, path.read_text(encoding="utf-8", errors="replace")) for path in _library_files()]
    return [document for document in documents if len(document.text) >= _MIN_CHARACTERS]


def _library_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))


def _files(source: str) -> list[Document]:
    path = Path(source).expanduser()
    if path.is_file():
        found, root = [path], path.parent
    elif path.is_dir():
        found, root = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file()), path
    else:
        raise TextError(
            f"unknown text source {source!r}; allowed are prose, code, dialogue, wikitext, "
            "hub:<data set>[:<config>]:<split>:<column>, or a file or folder that exists"
        )
    texts = ((p, p.read_text(encoding="utf-8", errors="replace")) for p in found)
    return [Document(str(p.relative_to(root)), text) for p, text in texts if text.strip()]


def _hub(source: str) -> Iterator[Document]:
    parts = source.split(":")[1:]
    if len(parts) not in (3, 4) or not all(parts):
        raise TextError(f"text source {source!r} is not of the form hub:<data set>[:<config>]:<split>:<column>")
    name, *config, split, column = parts
    from datasets import load_dataset  # slow to import, and only needed here

    try:
        rows = load_dataset(name, *config, split=split)
    except Exception as error:  # datasets passes on whatever the network, the hub or a parser raises
        raise TextError(f"text source {source!r} cannot be loaded: {first_line(error)}") from error
    if column not in rows.column_names:
        raise TextError(f"{name} has no column {column!r}, only {', '.join(rows.column_names)}")
    for index, row in enumerate(rows.select_columns(column)):
        if str(row[column]).strip():
            yield Document(f"{name}[{split}][{index}]", str(row[column]))


def _articles(lines: Iterable[Document], limit: int) -> list[Document]:
    """The first ``limit`` articles of WikiText, which comes line by line.

    An article begins at a heading of the first level: `` = Title = ``.
    """
    articles: list[list[str]] = []
    for line in lines:
        text = line.text.strip()
        if (text.startswith("= ") and not text.startswith("= = ")) or not articles:
            if len(articles) == limit:
                break
            articles.append([])
        articles[-1].append(line.text)
    return [Document(f"wikitext article {index}", "".join(parts)) for index, parts in enumerate(articles)]
