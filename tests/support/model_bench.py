"""A bench in this process that can do all that a search asks of one; times follow from a rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nccltune.bench.nccl_log import NcclReport
from nccltune.measurement import (
    KeepGoing,
    Launch,
    Outcome,
    PayloadMeasurement,
    PayloadRequest,
    Settings,
)

Effect = Callable[[Settings, int], float]
"""Settings and payload size -> time over the baseline's."""
Ending = Callable[[Settings], Outcome]
"""Settings -> how a launch under them ends."""


def unchanged(_settings: Settings, _size_bytes: int) -> float:
    """Whatever is set, nothing changes."""
    return 1.0


def always_ok(_settings: Settings) -> Outcome:
    """Whatever is set, it works."""
    return Outcome.OK


def base_us(size_bytes: int) -> float:
    """Time of the baseline."""
    return 7.0 + size_bytes / 300_000.0


@dataclass(slots=True)
class ModelBench:
    """Answers at once.

    Attributes:
        noise: standard deviation of a launch's common factor.
        endings: launch number -> how it ends, whatever the settings; before ``ending`` is asked.
        interrupt_at: number of the launch in which Ctrl-C is pressed.
        recorded: baseline launches, where this stands for a recording.
        candidates: settings that can be launched; None for all.
    """

    effect: Effect = unchanged
    ending: Ending = always_ok
    endings: Mapping[int, Outcome] = field(default_factory=dict)
    collectives: Sequence[Outcome] = (Outcome.OK,)
    noise: float = 0.0
    seed: int = 0
    interrupt_at: int | None = None
    recorded: Sequence[Launch] = ()
    candidates: Sequence[Settings] | None = None
    source: str = "gpus"
    launches: list[Settings] = field(default_factory=list)
    checked: list[Settings] = field(default_factory=list)
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def launch(
        self,
        settings: Settings,
        requests: Sequence[PayloadRequest],
        *,
        keep_going: KeepGoing | None = None,
    ) -> Launch:
        """Measure by the rule."""
        number = len(self.launches)
        self.launches.append(dict(settings))
        if number == self.interrupt_at:
            raise KeyboardInterrupt
        outcome = self.endings.get(number, self.ending(settings))
        if outcome is not Outcome.OK:
            return Launch(dict(settings), outcome, message=f"it ended {outcome}", duration_s=0.5)
        factor = 1.0 + self.noise * self.random.gauss(0.0, 1.0)
        payloads: list[PayloadMeasurement] = []
        for request in requests:
            us = factor * base_us(request.size_bytes) * self.effect(settings, request.size_bytes)
            samples = (0.99 * us, us, 1.01 * us)
            payloads.append(
                PayloadMeasurement.from_samples(request.size_bytes, samples, is_data_ok=True)
            )
            is_last = len(payloads) == len(requests)
            if keep_going is not None and not keep_going(payloads[-1]) and not is_last:
                return Launch(dict(settings), Outcome.OK, tuple(payloads), is_pruned=True)
        return Launch(dict(settings), Outcome.OK, tuple(payloads), duration_s=0.5)

    def nearest(self, proposal: Settings, tried: Sequence[Settings]) -> Settings | None:
        """Return the proposal, or the first candidate that is left."""
        if self.candidates is None or proposal in self.candidates:
            return proposal
        return next((one for one in self.candidates if one not in tried), None)

    def baseline_launches(self) -> Sequence[Launch]:
        """Return what was recorded."""
        return self.recorded

    def inspect(self, settings: Settings, requests: Sequence[PayloadRequest]) -> NcclReport:
        """Say that a ring does it."""
        del settings
        return NcclReport(used={one.size_bytes: "ring LL, 4 channels" for one in requests})

    def check_collectives(
        self, settings: Settings, gathers: Sequence[PayloadRequest] = ()
    ) -> Launch:
        """Give one outcome after the other, the last for ever; where it is ok, time gathers."""
        outcome = self.collectives[min(len(self.checked), len(self.collectives) - 1)]
        self.checked.append(dict(settings))
        message = "" if outcome is Outcome.OK else f"it ended {outcome}"
        times = [
            (one.size_bytes, base_us(one.size_bytes) * self.effect(settings, one.size_bytes))
            for one in gathers
            if outcome is Outcome.OK
        ]
        return Launch(
            dict(settings),
            outcome,
            message=message,
            memory_bytes=(1 << 26, 1 << 27),
            gathers=tuple(
                PayloadMeasurement.from_samples(size, (us,), is_data_ok=True) for size, us in times
            ),
        )


@dataclass(slots=True)
class RecordingOf:
    """The same without fresh launches, so that a search takes it for a recording."""

    bench: ModelBench

    @property
    def source(self) -> str:
        """Its name."""
        return "recording:model"

    def launch(
        self,
        settings: Settings,
        requests: Sequence[PayloadRequest],
        *,
        keep_going: KeepGoing | None = None,
    ) -> Launch:
        """Answer as the bench does."""
        return self.bench.launch(settings, requests, keep_going=keep_going)

    def nearest(self, proposal: Settings, tried: Sequence[Settings]) -> Settings | None:
        """Answer as the bench does."""
        return self.bench.nearest(proposal, tried)

    def baseline_launches(self) -> Sequence[Launch]:
        """Answer as the bench does."""
        return self.bench.recorded
