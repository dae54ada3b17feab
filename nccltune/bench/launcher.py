"""A bench on real GPUs: every launch starts all ranks afresh and leaves nothing behind."""

from __future__ import annotations

import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from nccltune.bench.faults import RankFault, wrong_data_fault
from nccltune.bench.gpu_watch import GpuWatch
from nccltune.bench.host import HostPlan, rank_environ
from nccltune.bench.launch_record import LaunchRecord, raise_if_wrong, slowest_of
from nccltune.bench.leftovers import (
    list_segments,
    make_folder,
    remove_segments,
    temporary_folder,
)
from nccltune.bench.nccl_log import NcclReport, parse_nccl_log
from nccltune.bench.prepared import PreparedServer, ServerGone
from nccltune.bench.rank import FAULT_VARIABLE, RankJob, RankSamples, Role
from nccltune.bench.ranks import Ranks
from nccltune.measurement import KeepGoing, Launch, Outcome, PayloadRequest, Settings

DEFAULT_DEADLINE_S = 30.0
DEVICE_MODULE = "nccltune.bench.device"
COMMUNICATORS_PER_SERVER = 2
"""SGLang keeps two on the tensor-parallel group: its own for graphs, torch's for everything
else."""

_LOOKUP = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING"}


class GpuBench:
    """Measures settings on real GPUs (``nccltune.measurement.Bench``).

    Args:
        plan: which rank runs on which GPU and cores.
        base: NCCL and CUDA variables that hold in every launch, below the settings: what SGLang
            sets by itself and what the operator has set.
        deadline_s: for what the settings take part in, from joining the communicator to the last
            answer. What comes before has as long; the end of the launch before counts to neither.
        is_fresh: start new interpreters for every launch instead of forking; only to measure what
            forking saves.
        watch: sees whether the GPUs are ours alone and their memory comes back; none by default.
        environ: what the server would find in its environment: it decides which NCCL and CUDA
            libraries ranks load (``host.FROM_LAUNCH``); None for this process's environment.
        device_module: what ranks drive; tests give a stand-in.

    Raises:
        RankError: rank processes cannot be started at all.
    """

    def __init__(
        self,
        plan: HostPlan,
        base: Mapping[str, str],
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        is_fresh: bool = False,
        watch: GpuWatch | None = None,
        environ: Mapping[str, str] | None = None,
        device_module: str = DEVICE_MODULE,
        test_fault: str = "",
    ) -> None:
        self._plan = plan
        self._base = dict(base)
        self._deadline_s = deadline_s
        self._is_fresh = is_fresh
        self._watch = watch or GpuWatch()
        self._environ = None if environ is None else dict(environ)
        self._device_module = device_module
        self._test_fault = test_fault
        self._seeds = itertools.count(1)
        self._leaving: list[Ranks] = []
        self._folder = make_folder()
        try:
            self._server = self._start_server()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def source(self) -> str:
        """Where the numbers come from."""
        return "shared-gpu" if self._plan.is_shared else "gpus"

    @property
    def versions(self) -> dict[str, str]:
        """Versions of torch and of the NCCL that is really loaded."""
        return self._server.versions

    def nearest(self, proposal: Settings, tried: Sequence[Settings]) -> Settings:
        """Return the proposal: real GPUs can measure anything, also again."""
        del tried
        return proposal

    def baseline_launches(self) -> Sequence[Launch]:
        """Return nothing: real GPUs measure the baseline afresh."""
        return ()

    def launch(
        self,
        settings: Settings,
        requests: Sequence[PayloadRequest],
        *,
        keep_going: KeepGoing | None = None,
    ) -> Launch:
        """Measure payloads in order under settings."""

        def work(ranks: Ranks, record: LaunchRecord) -> None:
            for request in requests:
                answers = self._measure(ranks, request)
                measured = slowest_of(request, answers)
                record.payloads.append(measured)
                raise_if_wrong(f"an all-reduce of {request.size_bytes} B", answers)
                is_last = len(record.payloads) == len(requests)
                if keep_going is not None and not keep_going(measured) and not is_last:
                    record.is_pruned = True
                    return

        return self._run(settings, {}, work)

    def inspect(self, settings: Settings, requests: Sequence[PayloadRequest]) -> NcclReport:
        """Look up what NCCL really does under settings, in an untimed launch with its log on.

        An empty report means that the launch failed.
        """
        once = [PayloadRequest(r.size_bytes, 1, replay_count=1, warmup_count=0) for r in requests]

        def work(ranks: Ranks, record: LaunchRecord) -> None:
            for request in once:
                record.payloads.append(slowest_of(request, self._measure(ranks, request)))

        with temporary_folder(self._folder) as folder:
            self._run(settings, {**_LOOKUP, "NCCL_DEBUG_FILE": str(folder / "%p")}, work)
            logs = [path.read_text(errors="replace") for path in sorted(folder.iterdir())]
        return parse_nccl_log(itertools.chain.from_iterable(log.splitlines() for log in logs))

    def check_collectives(
        self, settings: Settings, gathers: Sequence[PayloadRequest] = ()
    ) -> Launch:
        """Run all-gather, broadcast and reduce-scatter, and measure what communicators cost.

        A profile can pass every all-reduce and stop a server, whose other collectives find no
        algorithm. Where all their data is right, the all-gathers asked for are timed.
        """

        def work(ranks: Ranks, record: LaunchRecord) -> None:
            for _ in range(COMMUNICATORS_PER_SERVER - 1):
                self._connect(ranks)
            answers = ranks.ask("running other collectives", "check_collectives", next(self._seeds))
            wrong = {
                name: [rank for rank, answer in enumerate(answers) if not answer[name]]
                for name in sorted(answers[0])
            }
            free = ranks.ask("reading memory", "free_bytes")
            # Ranks that share a GPU all see what they took together.
            sharers = self._plan.rank_count if self._plan.is_shared else 1
            record.memory_bytes = tuple(
                (before - after) // sharers
                for before, after in zip(record.free_bytes, free, strict=True)
            )
            fault = wrong_data_fault(wrong, len(answers))
            if fault is not None:
                raise fault
            for request in gathers:
                timed = self._measure(ranks, request, "measure_gather")
                record.gathers.append(slowest_of(request, timed))
                raise_if_wrong(f"an all-gather of {request.size_bytes} B a rank", timed)

        return self._run(settings, {}, work)

    def close(self) -> None:
        """End the server and remove temporary files."""
        with suppress(RankFault):  # there is no launch left that it could disturb
            self._await_last()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_server(self) -> PreparedServer:
        server = self._begin_server()
        server.await_ready()
        return server

    def _begin_server(self) -> PreparedServer:
        return PreparedServer(self._device_module, self._rank_environ(0, {}))

    def _rank_environ(self, rank: int, settings: Settings) -> dict[str, str]:
        return rank_environ(self._base, self._plan, rank, settings, launch_environ=self._environ)

    @contextmanager
    def _servers(self) -> Iterator[list[PreparedServer]]:
        if not self._is_fresh:
            yield [self._server]
            return
        with ExitStack() as stack:
            # All begin before any is waited for, as the ranks of a server do.
            ranks = range(self._plan.rank_count)
            fresh = [stack.enter_context(closing(self._begin_server())) for _ in ranks]
            for server in fresh:
                server.await_ready()
            yield fresh

    def _run(
        self,
        settings: Settings,
        extra: Mapping[str, str],
        work: Callable[[Ranks, LaunchRecord], None],
    ) -> Launch:
        """Launch, and once more where that ended with the process that ranks are forked from.

        Raises:
            ServerGone: it ended again.
        """
        try:
            return self._attempt(settings, extra, work)
        except ServerGone as error:
            if self._is_fresh:
                raise
            self._server.close()
            self._server = self._start_server()
            again = self._attempt(settings, extra, work)
            return replace(again, message=again.message or f"launched again: {error}")

    def _attempt(
        self,
        settings: Settings,
        extra: Mapping[str, str],
        work: Callable[[Ranks, LaunchRecord], None],
    ) -> Launch:
        began = time.monotonic()
        record = LaunchRecord()
        segments = list_segments()
        try:
            self._watch.begin()
        except RankFault as fault:
            record.fault = fault
            return record.launch(settings, time.monotonic() - began)
        with temporary_folder(self._folder) as logs, self._servers() as servers:
            ranks = Ranks(servers, self._jobs(settings, extra, logs), self._deadline_s)
            try:
                self._open(ranks, record)
                with record.phase("measure"):
                    work(ranks, record)
                with record.phase("teardown"):
                    ranks.ask("closing", "close")
                    ranks.leave()
                    self._leaving.append(ranks)
                    if self._is_fresh:
                        self._await_last()
            except RankFault as fault:
                record.fault = fault
            finally:
                with record.phase("kill"):
                    if ranks not in self._leaving:
                        ranks.kill()
        if record.fault is not None:
            self._clean_up(ranks, segments, record)
            if self._server.is_gone:  # what became of its ranks says nothing of the settings
                raise self._server.gone_error()
        return record.launch(settings, time.monotonic() - began)

    def _clean_up(self, ranks: Ranks, segments: frozenset[str], record: LaunchRecord) -> None:
        """After a kill: nothing of the ranks may stay, or the host is to blame from here on."""
        remove_segments(segments)
        stuck = ranks.stuck_fault()
        if stuck is not None and ranks not in self._leaving:
            self._leaving.append(ranks)
        record.fault = stuck or self._watch.await_memory() or record.fault

    def _open(self, ranks: Ranks, record: LaunchRecord) -> None:
        with record.phase("start"), _hosts_fault():
            ranks.await_start()
        with record.phase("context"):
            with _hosts_fault():
                ranks.ask("opening its GPU", "open_context")
            self._await_last()
            ranks.restart_clock()  # whatever took time so far, the settings did not
            self._watch.check_alone(Counter(gpu.uuid for gpu in self._plan.gpus))
            with _hosts_fault():
                record.free_bytes = tuple(ranks.ask("reading memory", "free_bytes"))
        with record.phase("communicator"):
            self._connect(ranks)

    def _await_last(self) -> None:
        """See the ranks of the launch before out.

        A process with a CUDA context takes a while to end, as another takes one to begin: both
        happen at the same time, but nothing is measured before the GPUs are free.

        Raises:
            RankFault: some do not end. The next launch looks for them again.
        """
        while self._leaving:
            self._leaving[0].await_gone()
            fault = self._leaving[0].stuck_fault()
            if fault is not None:
                raise fault
            self._leaving.pop(0)

    @staticmethod
    def _connect(ranks: Ranks) -> None:
        ranks.ask(
            "joining the communicator", "connect", ranks.ask_first("making an id", "unique_id")
        )

    def _measure(
        self, ranks: Ranks, request: PayloadRequest, command: str = "measure"
    ) -> list[RankSamples]:
        what = f"measuring {request.size_bytes} B"
        return ranks.ask(what, command, request, next(self._seeds))

    def _jobs(self, settings: Settings, extra: Mapping[str, str], logs: Path) -> list[RankJob]:
        jobs = []
        for rank in range(self._plan.rank_count):
            environ = {
                **self._rank_environ(rank, settings),
                "NCCL_DEBUG": "WARN",
                **extra,
            }
            if self._test_fault:
                environ[FAULT_VARIABLE] = self._test_fault
            role = Role(rank, self._plan.rank_count, self._plan.device_ordinal(rank))
            cpu_set = self._plan.cpu_sets[rank] if self._plan.cpu_sets else frozenset()
            log, steps = (str(logs / f"rank{rank}.{kind}") for kind in ("log", "step"))
            jobs.append(RankJob(role, environ, log, steps, cpu_set))
        return jobs


@contextmanager
def _hosts_fault() -> Iterator[None]:
    """Put a fault down to the host, where no setting has been read yet."""
    try:
        yield
    except RankFault as fault:
        raise RankFault(Outcome.HOST_FAILED, str(fault), fault.rank) from fault
