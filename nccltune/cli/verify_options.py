"""The options of ``nccltune verify``: what was typed, and what of it makes no sense."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from nccltune.cli.options import Decorated, add_options
from nccltune.cli.start_limits import start_limit_options
from nccltune.errors import FileError, UsageProblem
from nccltune.profile import Profile
from nccltune.sglang.endpoints import KEY_VARIABLE
from nccltune.store import find_profile, read_active
from nccltune.supervise import Limits
from nccltune.verify.arms import ACTIVE, DEFAULT
from nccltune.verify.load.rounds import LoadPlan
from nccltune.verify.spec import DEFAULT_BOOTS

NOT_FOR_URL = ("boots", "num_steps", "resume", "any_host", "ready_timeout_s", "stall_timeout_s")


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What was typed."""

    arms: str | None
    boots: int | None
    url: str | None
    runs: int
    tokens: int
    concurrency: int
    num_steps: str | None
    markdown: Path | None
    resume: bool
    any_host: bool
    ready_timeout_s: float
    stall_timeout_s: float
    baseline: str | None

    @property
    def arm_words(self) -> tuple[str, ...]:
        """The arms as they were named; empty where none were."""
        return () if self.arms is None else _words("--arms", self.arms)

    @property
    def step_counts(self) -> tuple[int, ...]:
        """The numbers of draft steps; empty where none were given."""
        return () if self.num_steps is None else _numbers("--num-steps", self.num_steps)

    @property
    def limits(self) -> Limits:
        """How long a start may take."""
        return Limits(self.ready_timeout_s, self.stall_timeout_s)

    @property
    def load(self) -> LoadPlan:
        """What each server is asked."""
        return LoadPlan(run_count=self.runs, tokens=self.tokens, concurrency=self.concurrency)


def verify_options(command: Decorated) -> Decorated:
    """Add the options of the verb."""
    options = (
        click.option(
            "--arms",
            metavar="A,B",
            help="Which settings are compared, the baseline first: default, active, a profile's "
            "name or file, no-speculation, again (the baseline once more). Default: "
            "default,active. With --url: the one profile that the server should have.",
        ),
        click.option(
            "--boots",
            type=click.IntRange(min=1),
            metavar="N",
            help="Starts of each arm, at most; fewer than 4 decide nothing. Default: "
            f"{DEFAULT_BOOTS}, or as many as the verify that is resumed was begun with.",
        ),
        click.option(
            "--url",
            metavar="URL",
            help="Measure a server that runs, and start none. The key of a server that wants one "
            f"is read from {KEY_VARIABLE}.",
        ),
        click.option(
            "--baseline",
            metavar="ID",
            help="With --url: the stored verify to compare with. Default: all that fit.",
        ),
        click.option(
            "--runs",
            type=click.IntRange(min=1),
            default=5,
            show_default=True,
            metavar="N",
            help="Runs that count, on each start.",
        ),
        click.option(
            "--tokens",
            type=click.IntRange(min=2),
            default=500,
            show_default=True,
            metavar="N",
            help="Tokens of each answer.",
        ),
        click.option(
            "--concurrency",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            metavar="N",
            help="Requests at the same time.",
        ),
        click.option(
            "--num-steps",
            metavar="N[,N...]",
            help="Compare numbers of draft steps; draft tokens go with them.",
        ),
        click.option(
            "--markdown",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Write the report there, too.",
        ),
        click.option("--resume", is_flag=True, help="Go on with the last verify of this command."),
        click.option(
            "--any-host", is_flag=True, help="Use profiles on a host they were not made for."
        ),
        start_limit_options,
    )
    return add_options(options, command)


def default_arms() -> tuple[str, ...]:
    """Return what is compared where nothing was named.

    Raises:
        UsageProblem: there is no active profile.
    """
    if read_active().name is None and read_active().problem is None:
        raise UsageProblem(
            "no profile is active, so that there is nothing to compare with the defaults: name one "
            "with --arms default,NAME (nccltune profile list), or give --num-steps",
            code="no_active_profile",
        )
    return (DEFAULT, ACTIVE)


def find_arm_profile(word: str) -> Profile:
    """Return the profile of an arm: the active one, or one of the store or a file.

    Raises:
        UsageProblem: there is none.
        FileError: it cannot be used.
    """
    if word != ACTIVE:
        return find_profile(word).profile
    active = read_active()
    if active.profile is not None:
        return active.profile
    if active.problem is not None:
        raise FileError(active.path, f"the active profile cannot be used: {active.problem}")
    raise UsageProblem(
        "--arms active: no profile is active; name one, or nccltune profile activate it first",
        code="no_active_profile",
    )


def expected_profile(words: tuple[str, ...]) -> Profile | None:
    """Return what a server that runs should have; None for the active profile.

    Raises:
        UsageProblem: more than one is named, or one that does not exist.
    """
    if len(words) > 1:
        raise UsageProblem(
            f"--arms {','.join(words)}: a server that runs has the one environment that it was "
            "started with; name the profile that it should have, or none",
            code="conflicting_options",
        )
    if words == (DEFAULT,):
        return Profile(DEFAULT, {})
    return None if words in ((), (ACTIVE,)) else find_arm_profile(words[0])


def check_url_options(context: click.Context, launch: tuple[str, ...]) -> None:
    """Refuse what has nothing to say about a server that runs."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in NOT_FOR_URL
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    given += ["-- CMD"] if launch else []
    if given:
        raise UsageProblem(
            f"--url starts no server, so {given[0]} has nothing to say: leave one of the two out",
            code="conflicting_options",
        )


def api_key() -> str:
    """Return the key of the running server; empty where none is given.

    Raises:
        UsageProblem: what is given is no key.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable():
        raise UsageProblem(f"{KEY_VARIABLE}: holds what no API key does", code="bad_value")
    return key


def check_markdown(path: Path | None) -> None:
    """Refuse, before minutes are spent, a file that could not be written.

    A temporary file beside it is the proof: rights, full names and read-only disks are in it.
    """
    if path is None:
        return
    try:
        target = path.resolve(strict=False)
        if target.exists() and not target.is_file():
            raise FileError(path, "--markdown needs a plain file", code="not_a_file")
        if not target.parent.is_dir():
            raise FileError(path, "its folder does not exist; create it first", code="cannot_write")
        if not target.exists():
            target.open("x").close()
            target.unlink()
        with tempfile.TemporaryFile(dir=target.parent):
            return
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or "it is a circle of links"
        raise FileError(path, f"cannot be written ({reason})", code="cannot_write") from None


def _words(option: str, text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise UsageProblem(f"{option} {text!r}: a name is missing; write A,B", code="bad_value")
    return words


def _numbers(option: str, text: str) -> tuple[int, ...]:
    numbers = []
    for word in _words(option, text):
        if not word.isascii() or not word.isdecimal() or not 0 < int(word) <= 64:
            hint = "; for none give --arms no-speculation" if word == "0" else ""
            raise UsageProblem(
                f"{option} {text}: {word!r} is no number of draft steps{hint}", code="bad_value"
            )
        numbers.append(int(word))
    return tuple(numbers)
