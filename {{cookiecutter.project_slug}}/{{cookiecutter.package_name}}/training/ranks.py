"""One process a rank on this machine, by torch's elastic launcher: the engine of torchrun."""

import json
import logging
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from ..errors import UserError
from ..paths import ROOT
from .resumable import exit_code, handle_signals

SHUTDOWN = 300  # seconds in which ranks that were sent a signal must have saved


def start_ranks(folder: Path, count: int) -> None:
    """Start ranks that read config.yaml of the run folder; none reads the command line.

    Raises:
        UserError: With the traceback of the rank that failed first.
        SystemExit: 143 or 130 where a signal ended the run.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # it tells of each signal it sends
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(search)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    received: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1:  # ranks are sessions of their own: no terminal reaches them
            raise SignalException(f"received {signum}", sigval=signal.Signals(signum))
        if received[-2:] == [signal.SIGINT, signal.SIGINT]:  # whoever asks twice will not wait
            for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)

    handle_signals(pass_on)
    with TemporaryDirectory() as scratch:
        launcher = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            max_restarts=0,
            monitor_interval=0.5,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle="SIGQUIT",  # the others are ours
            shutdown_timeout=SHUTDOWN,
        )
        module = f"{__package__}.fit"
        try:
            elastic_launch(launcher, sys.executable)("-m", module, str(folder))
        except SignalException:
            if files := sorted(Path(scratch).rglob("error.json"), key=_age):
                raise _failure(files[0]) from None  # a rank could not save
            sys.exit(exit_code(received[0] if received else signal.SIGTERM))
        except ChildFailedError as error:
            rank, failure = min(error.failures.items(), key=lambda item: _when(item[1]))
            file, code = Path(failure.error_file), failure.exitcode
            if file.is_file():
                raise _failure(file, rank) from None
            if code in (exit_code(signal.SIGINT), exit_code(signal.SIGTERM)):
                sys.exit(code)  # one rank alone was sent the signal
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            hint = ", as the system does when memory is short" if name == "SIGKILL" else ""
            raise UserError(f"rank {rank} was ended by {name}{hint}.") from None


def _when(failure: Any) -> float:
    """When a rank failed: the others fail a moment later, for want of it, or are ended."""
    file = Path(failure.error_file)
    if file.is_file():
        return _age(file)
    # Seen at the launcher's next look, up to a second after it; SIGTERM is the launcher's own.
    return float("inf") if failure.exitcode == -signal.SIGTERM else failure.timestamp - 1.0


def _age(file: Path) -> float:
    return file.stat().st_mtime


def _failure(file: Path, rank: int | None = None) -> UserError:
    """What ended a rank: the user's mistake in one line, anything else with its traceback."""
    said = json.loads(file.read_text(encoding="utf-8"))["message"]
    kind, _, text = said["message"].partition(": ")
    if kind == UserError.__name__:
        return UserError(text)
    who = "a rank" if rank is None else f"rank {rank}"
    return UserError(f"{who} failed.\n{said['extraInfo']['py_callstack'].strip()}")
