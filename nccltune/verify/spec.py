"""What a verify is asked to do, and how it tells where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from nccltune.supervise import Limits, Moment

if TYPE_CHECKING:
    from nccltune.verify.load.rounds import LoadPlan
    from nccltune.verify.model import Arm, Boot
    from nccltune.verify.record import VerifyRecord

DEFAULT_BOOTS = 4


@dataclass(frozen=True, slots=True)
class VerifySpec:
    """What to measure.

    Attributes:
        launch: the command as typed.
        arms: as ``make_arms`` made them of it; the first is the baseline.
        environ: the environment that every server is started in, before its arm's settings.
        boots: how often each arm is started at most; an even number. None for the usual, or as
            many as the verify that is resumed was begun with.
        load: what each server is asked.
        limits: of a start, as for ``nccltune launch``.
        is_any_host: a person overrides the rules about hosts.
        is_resume: go on with the newest verify of the same kind that is not finished or judged.
        boot_s: how long a boot takes, by earlier verifies; None where that is not known.
        is_decided: asked after each round; True ends the verify before all boots are made.
        on_begin: told of the record when nothing stands in the way of the first boot any more.
    """

    launch: tuple[str, ...]
    arms: tuple[Arm, ...]
    environ: Mapping[str, str]
    load: LoadPlan
    boots: int | None = None
    limits: Limits = field(default_factory=Limits)
    is_any_host: bool = False
    is_resume: bool = False
    boot_s: float | None = None
    is_decided: Callable[[VerifyRecord], bool] | None = None
    on_begin: Callable[[VerifyRecord], None] | None = None


class VerifyStage(StrEnum):
    """What happens to the server of a boot."""

    START = "start"
    MEASURE = "measure"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """Where a verify is.

    Attributes:
        position: of this boot in the order of all, from 0.
        boot_total: boots at most, those of an earlier process included.
        elapsed_s: since this process began to verify.
        remaining_s: at most, by the boots so far; None before there is one.
        moment: of the start, while the server starts.
        note: what the load is doing, or a remark that is not about this boot alone.
        boot: set once, when a boot is complete.
    """

    stage: VerifyStage
    arm: str
    position: int
    boot_total: int
    elapsed_s: float
    remaining_s: float | None = None
    moment: Moment | None = None
    note: str = ""
    boot: Boot | None = None


class VerifyObserver(Protocol):
    """Is told where a verify is, several times a second while a server starts."""

    def update(self, progress: VerifyProgress) -> None:
        """Take the newest news."""
