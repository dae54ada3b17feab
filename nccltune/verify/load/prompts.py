"""Prompts of our own writing: prose, as a draft model is trained on, the same for every server.

Each prompt differs from all others within its first words, so that no prefix cache shortens it.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from itertools import cycle, islice

_REQUEST = "Tell what happens next."


def short_prompt(series: str, idx: int) -> str:
    """Return a prompt of about 30 tokens.

    Args:
        series: prompts of different series differ too: ``Chapter``.
        idx: from 0.

    >>> short_prompt("Chapter", 0)
    'Chapter 1. The ferry left at six, an hour before the fog came down the river. Tell what \
happens next.'
    """
    paragraphs = _paragraphs()
    sentence = paragraphs[idx % len(paragraphs)].partition(". ")[0]
    return f"{series} {idx + 1}. {sentence}. {_REQUEST}"


def long_prompt(series: str, idx: int, word_count: int) -> str:
    """Return a prompt of so many words: varied prose, beginning somewhere else for each index."""
    paragraphs = _paragraphs()
    start = idx % len(paragraphs)
    ordered = paragraphs[start:] + paragraphs[:start]
    endings = _REQUEST.split()
    head = f"{series} {idx + 1}."
    wanted = max(0, word_count - len(head.split()) - len(endings))
    words = islice(cycle(" ".join(ordered).split()), wanted)
    return " ".join([head, *words, *endings])


def count_words(prompt: str) -> int:
    """Return how many words a prompt has."""
    return len(prompt.split())


@cache
def _paragraphs() -> tuple[str, ...]:
    text = (files("nccltune.verify.load") / "prose.txt").read_text(encoding="utf-8")
    return tuple(" ".join(each.split()) for each in text.split("\n\n"))
