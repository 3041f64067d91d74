"""`launcher=slurm`: a run becomes a SLURM job, a sweep a job array. No torch here."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import TracebackType

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from ..cli import at_end
from ..errors import UserError
from ..log import console
from ..paths import ROOT, as_typed

# Keys of the config that sbatch knows by the same name.
SAME_NAME = ("nodes", "time", "cpus_per_task", "mem", "partition", "account", "qos", "constraint")

# What a sweep has made so far: options of sbatch → the run folders to send with them.
_sweep: dict[tuple[str, ...], list[Path]] = {}


def submit(folder: Path, config: DictConfig) -> None:
    """Send a run to SLURM; of a sweep, all runs as one job array once the last one is made.

    Args:
        folder: The run folder, which holds config.yaml.
        config: The resolved config.

    Raises:
        UserError: If the config does not fit a job, or sbatch is missing or refuses it.
    """
    check(config)
    options = sbatch_options(config)
    if not config.launcher.submit:
        say(shlex.join(command(options, [folder])))
    elif HydraConfig.get().mode == RunMode.RUN:
        send(options, [folder])
    else:
        if options not in _sweep:  # an array's jobs all ask SLURM for the same things
            at_end.push(partial(_send_sweep, options))
        _sweep.setdefault(options, []).append(folder)


def check(config: DictConfig) -> None:
    """Refuse what no job could do; ranks and batch size were checked before."""
    job, trainer = config.launcher, config.trainer
    if not isinstance(job.grace, int) or job.grace < 1:
        raise UserError(f"launcher.grace={job.grace}: take a whole number of seconds above 0.")
    if trainer.num_nodes != job.nodes:
        raise UserError(
            f"trainer.num_nodes={trainer.num_nodes} and launcher.nodes={job.nodes}: "
            "set launcher.nodes alone."
        )
    # Such a job would be warned as soon as it starts, and go back to the queue for ever.
    if job.time is not None and seconds(str(job.time)) <= job.grace:
        raise UserError(
            f"launcher.time={job.time} is over in the launcher.grace={job.grace} seconds in which "
            "a run saves and ends: raise the first or lower the second."
        )
    if job.submit and shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not installed here: submit where SLURM is, "
            "or see the command with launcher.submit=false"
        )


def seconds(limit: str) -> int:
    """A time limit as sbatch reads it: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit):
        raise UserError(
            f"launcher.time={limit}: take minutes, HH:MM:SS or D-HH:MM:SS, such as 02:00:00"
        )
    if not dash and len(parts) < 3:
        parts.insert(0, "0")
    hours, minutes, rest = (int(part) for part in [*parts, "0", "0"][:3])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def sbatch_options(config: DictConfig) -> tuple[str, ...]:
    """What SLURM is asked for; one task is one rank."""
    job, trainer = config.launcher, config.trainer
    same = [f"--{key.replace('_', '-')}={job[key]}" for key in SAME_NAME if job[key] is not None]
    gpus = [] if trainer.accelerator == "cpu" else [f"--gpus-per-node={trainer.devices}"]
    return (
        f"--job-name={config.name}",
        *same,
        f"--ntasks-per-node={trainer.devices}",
        *gpus,
        f"--signal=B:USR1@{job.grace}",
        "--requeue",
        "--open-mode=append",
        *job.options,
    )


def command(options: tuple[str, ...], folders: list[Path]) -> list[str]:
    """The command that sends one run, or several as an array."""
    if len(folders) == 1:
        # `%` begins a pattern of SLURM's.
        place = [f"--output={folders[0] / 'slurm.log'}".replace("%", "%%")]
    else:
        # The script writes each run's slurm.log itself: no pattern leads to the run folders.
        place = [f"--array=0-{len(folders) - 1}", f"--output={os.devnull}"]
    paths = [str(path) for path in (ROOT / "cluster/slurm.sh", *folders)]
    return ["sbatch", "--parsable", f"--chdir={ROOT}", *options, *place, *paths]


def send(options: tuple[str, ...], folders: list[Path]) -> None:
    """Run sbatch, keep the job's id in each run folder, and say how to follow the job.

    Raises:
        UserError: If sbatch refuses the job.
    """
    done = subprocess.run(
        command(options, folders),
        env={**os.environ, "PYTHON": sys.executable},  # for the script, by --export=ALL
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = [line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines()]
        raise UserError(f"sbatch refused the job: {' '.join(said) or done.returncode}")
    job = done.stdout.split()[-1].partition(";")[0]  # `<id>;<cluster>` where there are several
    for index, folder in enumerate(folders):
        task = f"{job}_{index}" if len(folders) > 1 else job
        (folder / "slurm.job").write_text(f"{task}\n", encoding="utf-8")
        say(f"job {task:<11} {as_typed(folder)}")
    log = folders[0] / "slurm.log"
    say(f"queue           squeue --job {job}")
    say(f"cancel          scancel {job}")
    say(f"log             tail -F {shlex.quote(as_typed(log))}")


def say(line: str) -> None:
    """Print a line as it is."""
    console.print(line, markup=False, highlight=False)


def _send_sweep(
    options: tuple[str, ...],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Send what a sweep has collected. A job that failed keeps none back, an interruption all."""
    folders = _sweep.pop(options)
    if kind is None or issubclass(kind, Exception):
        send(options, folders)
