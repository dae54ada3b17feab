"""``nccltune launch``: starts a server under the active profile, and stays in front of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nccltune.cli.envelope import Complaint, failure_from, one_line
from nccltune.cli.interrupts import handling
from nccltune.cli.launch_report import Report
from nccltune.cli.launch_tuning import Tuned, record_launch, tune
from nccltune.cli.launch_view import LiveView, PlainView, make_view, ready_line
from nccltune.cli.start_limits import start_limit_options
from nccltune.errors import ExitCode, NccltuneError
from nccltune.sdnotify import OWN_VARIABLES, Notifier
from nccltune.sglang.command import parse_launch
from nccltune.sglang.endpoints import Endpoint, endpoint_of
from nccltune.supervise import Ending, Limits, Supervision
from nccltune.supervise.service import ServiceReport
from nccltune.supervise.warden import Warden

if TYPE_CHECKING:
    from nccltune.cli.invocation import Invocation

PASSED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_REPORT_OPTION = "--report-file"
_POLICIES = ("eagle3", "speculative", "all")


class LaunchCommand(click.Command):
    """A command that writes its report even where its own options make no sense."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse the options; what is wrong with them goes into the report too."""
        path = _given_report(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            failure = failure_from(error, info_name or "")
            with suppress(NccltuneError):
                Report(path).write_failure(failure.complaint, failure.exit_code)
            raise


@click.command(
    cls=LaunchCommand,
    context_settings={"allow_interspersed_args": False},
)
@start_limit_options
@click.option(
    "--policy",
    type=click.Choice(_POLICIES),
    help="Which SGLang launches get a profile. Default: what policy.json in the state folder says, "
    "else eagle3.",
)
@click.option("--any-host", is_flag=True, help="Use the profile on a host it was not made for.")
@click.option("--require-profile", is_flag=True, help="Do not start without a profile.")
@click.option(
    _REPORT_OPTION,
    "report_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write an envelope when the server is ready, and again when it has ended.",
)
@click.argument("launch", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
@click.pass_obj
def command(
    invocation: Invocation | None,
    launch: tuple[str, ...],
    ready_timeout_s: float,
    stall_timeout_s: float,
    policy: str | None,
    any_host: bool,
    require_profile: bool,
    report_path: Path | None,
) -> None:
    """Start a server under the active profile and stay with it.

    Shows the stages of the start, ends it where it stands still, and reports to systemd. The
    server's output, signals and exit status go through unchanged.
    """
    if invocation is not None and invocation.wants_json:
        raise click.UsageError(
            "stdout is the server's: --report-file FILE takes the place of --json"
        )
    report = Report(report_path)
    view = make_view()
    try:
        tuned = tune(launch, policy=policy, is_any_host=any_host, is_required=require_profile)
        _introduce(tuned, report, view)
        if require_profile and not tuned.is_applied:
            reason = str(tuned.decision.get("reason", "no profile"))
            report.write_failure(Complaint("no_profile", reason), ExitCode.NO, "no")
            raise click.exceptions.Exit(ExitCode.NO)
        limits = Limits(ready_timeout_s, stall_timeout_s)
        ending = _supervise(launch, tuned, limits, report, view)
    except NccltuneError as error:
        with suppress(NccltuneError):
            report.write_failure(Complaint(error.code, one_line(str(error))), error.exit_code)
        raise
    finally:
        view.finish()
    raise click.exceptions.Exit(int(ending.exit_code))


def _supervise(
    argv: Sequence[str],
    tuned: Tuned,
    limits: Limits,
    report: Report,
    view: PlainView | LiveView,
) -> Ending:
    """Start the server, wait for it to be ready, and stay until it ends."""

    def warn(text: str) -> None:
        report.warnings.append(text)
        view.say(f"warning: {text}")

    service = ServiceReport(Notifier.from_environ(tuned.environ))
    environ = {name: each for name, each in tuned.environ.items() if name not in OWN_VARIABLES}
    server = Supervision(
        argv,
        environ,
        endpoint=_endpoint(argv),
        limits=limits,
        sink=view,
        observers=(view, service),
        warn=warn,
        tick_s=service.tick_s,
    )

    def on_started(pid: int) -> None:
        warden.watch(pid)
        _say_all(record_launch(tuned, pid), view)

    with Warden() as warden, server, handling(PASSED_SIGNALS, server.pass_on):
        server.start(on_started)
        ending = server.wait_ready()
        if ending is None:
            moment = server.moment()
            view.finish()
            view.say(ready_line(moment))
            _keep(lambda: report.write_moment(moment), view)
            ending = server.wait_end()
        view.finish()
        service.end(ending)
        if ending.message:
            view.say(ending.message)
        _keep(lambda: report.write_ending(ending, server.moment()), view)
        return ending


def _introduce(tuned: Tuned, report: Report, view: PlainView | LiveView) -> None:
    report.decision = tuned.decision
    report.warnings.extend(tuned.warnings)
    _say_all(tuned.lines, view)


def _say_all(lines: Iterable[str], view: PlainView | LiveView) -> None:
    for line in lines:
        view.say(line)


def _endpoint(argv: Sequence[str]) -> Endpoint | None:
    """Return where the server will listen; a command that is not understood says it in its log."""
    try:
        return endpoint_of(parse_launch(argv))
    except NccltuneError:
        return None


def _keep(write: Callable[[], None], view: PlainView | LiveView) -> None:
    """Write the report; one that cannot be written costs the server nothing."""
    try:
        write()
    except NccltuneError as error:
        view.say(f"warning: {error}")


def _given_report(args: Sequence[str]) -> Path | None:
    """Find the report file among words that may make no sense otherwise."""
    for idx, word in enumerate(args):
        if word == "--":
            return None
        if word == _REPORT_OPTION and idx + 1 < len(args):
            return Path(args[idx + 1])
        if word.startswith(f"{_REPORT_OPTION}="):
            return Path(word.partition("=")[2])
    return None
