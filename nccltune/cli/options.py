"""Options that several verbs share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from nccltune.errors import UsageProblem

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A number within bounds; ``nan`` and ``inf`` would slip through every comparison later."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read it.

        Raises:
            click.BadParameter: no number, not finite, or out of bounds.
        """
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**31 - 1),
    default=0,
    show_default=True,
    metavar="N",
    help="Random seed.",
)

json_option = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON envelope on stdout."
)
"""Only for the help: ``main`` looks for it before parsing, so that early failures obey it too."""


def workload_options(command: Decorated) -> Decorated:
    """Add the options that say which all-reduces matter."""
    options = (
        click.option(
            "--model",
            metavar="DIR",
            help="Folder with the model's config.json, that file, or a name in the Hugging Face "
            "cache. Default: Kimi-K2.5's shape.",
        ),
        click.option(
            "--tp",
            type=int,
            metavar="N",
            help="Tensor parallel size: ranks, one a GPU. Default: the launch's, else all GPUs.",
        ),
        click.option("--num-steps", type=int, metavar="S", help="Speculative steps. Default: 2."),
        click.option("--eagle-topk", type=int, metavar="K", help="EAGLE top-k. Default: 1."),
        click.option(
            "--num-draft-tokens",
            type=int,
            metavar="D",
            help="Draft tokens that one verify pass checks. Default: 3.",
        ),
        click.option(
            "--batch",
            "batches",
            multiple=True,
            metavar="SIZE:USE",
            help="A batch size and how often it is used. Repeatable. Default: 1:4 2:2 4:1 8:1.",
        ),
        click.option(
            "--payload",
            "payloads",
            multiple=True,
            metavar="BYTES:COUNT",
            help="An all-reduce size and its count a step, instead of a model. Repeatable.",
        ),
    )
    return add_options(options, command)


def launch_argument(command: Decorated) -> Decorated:
    """Take the server's launch command after ``--``."""
    return click.argument(
        "launch",
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="[-- CMD...]",
        callback=_refuse_nothing,
    )(command)


def _refuse_nothing(
    ctx: click.Context, _param: click.Parameter, launch: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse ``--`` with nothing after it: an unset shell variable, most often."""
    if not launch and ctx.obj is not None and ctx.obj.arguments[-1:] == ("--",):
        raise UsageProblem(
            "nothing stands after --: give the server's launch command, or leave -- out",
            code="no_launch",
        )
    return launch


def gpu_options(command: Decorated) -> Decorated:
    """Add the options that say how real GPUs are used."""
    options = (
        click.option(
            "--share-gpu",
            is_flag=True,
            help="Put all ranks on one GPU: for diagnosis only, latencies mean nothing.",
        ),
        click.option("--force", is_flag=True, help="Measure although somebody else uses the GPUs."),
        click.option(
            "--launch-timeout-s",
            type=FiniteRange(min=1.0),
            default=30.0,
            show_default=True,
            metavar="S",
            help="Deadline, in seconds, of what the settings take part in at one launch of all "
            "ranks. What comes before, starting the ranks and opening the GPUs, has as long.",
        ),
    )
    return add_options(options, command)


def add_options(
    options: tuple[Callable[[Decorated], Decorated], ...], command: Decorated
) -> Decorated:
    """Add options to a command, in their order in the help."""
    for option in reversed(options):
        command = option(command)
    return command
