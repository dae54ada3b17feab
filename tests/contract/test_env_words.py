"""The words of ``env`` in front of a launch are read as the real env(1) reads them."""

from __future__ import annotations

import random
import subprocess
from itertools import chain

import pytest

from nccltune.sglang.argv import env_effects, read_env

INHERITED = {"A": "1", "B": "2", "C": "3", "PATH": "/usr/bin:/bin"}
PRINT_ENV = "/usr/bin/printenv"
OPTIONS = (
    *(["-i"], ["-v"], ["-u", "A"], ["-uB"], ["-vi"], ["-vu", "C"], ["-iuA"], ["-viu", "B"]),
    *(["--unset=A"], ["--unset", "B"], ["--uns", "C"], ["--ignore-env"], ["--ignore-environment"]),
    *(["--debug"], ["--chdir=/tmp"], ["-C", "/"], ["-C/"], ["--ch", "/tmp"], ["-u", "NONE"]),
    ["--ignore-signal=PIPE"],
)


def draw(rng: random.Random) -> list[str]:
    """Return words of one ``env``, with a second one behind it now and then."""
    words = ["env", *chain(*rng.choices(OPTIONS, k=rng.randrange(4)))]
    words += rng.choice([[], [], ["--"], ["-"]])
    words += rng.sample(["A=x", "D=", "E=a=b", "B=y z"], rng.randrange(3))
    return [*words, *draw(rng)] if rng.random() < 0.3 else words


@pytest.mark.parametrize("seed", range(60))
def test_words_of_env_do_what_is_read_from_them(seed: int) -> None:
    words = draw(random.Random(seed))
    effects = env_effects(words)
    kept = {} if effects.emptied_by else INHERITED
    predicted = {n: v for n, v in kept.items() if n not in effects.unset} | effects.assigned

    # /usr/bin/env, for the first word may have no PATH to be found by in a second.
    real = [{"env": "/usr/bin/env"}.get(word, word) for word in words]
    done = subprocess.run(
        [*real, PRINT_ENV], env=INHERITED, capture_output=True, text=True, check=False
    )

    assert done.returncode in (0, 1), done.stderr  # 1: nothing to print
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert found == predicted


@pytest.mark.parametrize("words", [["--i"], ["--u"], ["--ignore"], ["--nonsense"], ["-x"]])
def test_words_that_env_refuses_are_taken_for_nothing(words: list[str]) -> None:
    done = subprocess.run(["env", *words, "true"], capture_output=True, check=False)
    call = read_env([*words, "true"])

    if done.returncode == 125:
        assert (call.emptied_by, call.unset, call.assigned) == ("", frozenset(), {})
