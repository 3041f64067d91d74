"""Jobs of a real SLURM: Debian's slurm-wlm and munge on this host, begun and ended by the tests."""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Run

# One host with more CPUs than it has, so that jobs run side by side.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0
MpiDefault=none
JobRequeue=1
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
NodeName={host} NodeAddr=127.0.0.1 CPUs=16
PartitionName=test Nodes={host} Default=YES
"""
DAEMONS = (
    "munged --foreground --force --key-file={folder}/munge.key --socket={folder}/munge.socket "
    "--pid-file={folder}/munged.pid --log-file={folder}/munged.log "
    "--seed-file={folder}/munged.seed",
    "slurmctld -D -i -f {folder}/slurm.conf",
    "slurmd -D -f {folder}/slurm.conf",
)
# In its first life a job dawdles from the second epoch on: there is time to interrupt it.
SLOW = """
import os, time
from lightning.pytorch import Callback

class Slow(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.current_epoch and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(1)
"""
JOB = ["launcher=slurm", "launcher.cpus_per_task=1", "trainer.accelerator=cpu"]
EPOCHS = 12
SHORT = [
    "model=mlp",
    f"trainer.max_epochs={EPOCHS}",
    "+callbacks.slow._target_=slow.Slow",
    "callbacks.early_stopping=null",
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster of one host, on folders and ports of its own."""
    folder = tmp_path_factory.mktemp("slurm")
    search = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    commands = [daemon.format(folder=folder).split() for daemon in DAEMONS]
    for command in (*commands, ["sbatch"], ["srun"]):
        if shutil.which(command[0], path=search) is None:
            pytest.skip(f"{command[0]} is not installed: apt-get install slurm-wlm munge")
    facts = {"folder": folder, "host": socket.gethostname().partition(".")[0]}
    conf = CONF.format(**facts, user=getpass.getuser(), ports=free_ports(2))
    (folder / "slurm.conf").write_text(conf)
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    (folder / "spool").mkdir()
    (folder / "state").mkdir()
    (folder / "slow.py").write_text(SLOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", search)
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        with (folder / "log").open("w") as log:
            daemons = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
            try:
                if not until(lambda: asked("sinfo", "-h", "-o", "%T") == "idle", 30):
                    pytest.skip(f"SLURM does not start here: {(folder / 'log').read_text()[-600:]}")
                yield
                asked("scancel", "--user", getpass.getuser())
                until(lambda: not asked("squeue", "-h"), 40)
            finally:
                for daemon in reversed(daemons):
                    daemon.terminate()
                    daemon.wait(timeout=30)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def asked(*command: str) -> str:
    """What one of SLURM's commands prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def until(true: Callable[[], object], timeout: float) -> bool:
    """Wait for something; whether it came."""
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


class Job:
    """The job of a run folder."""

    def __init__(self, folder: Path) -> None:
        """The run folder knows the job's id."""
        self.folder = folder
        self.name = (folder / "slurm.job").read_text().strip()

    def field(self, name: str) -> str:
        """What SLURM knows of it."""
        found = re.search(rf"\b{name}=(\S+)", asked("scontrol", "-o", "show", "job", self.name))
        return found[1] if found else ""

    def wait(self, true: Callable[[], object]) -> None:
        """Wait for something the job does; where it does not, show what it wrote."""
        log = self.folder / "slurm.log"
        assert until(true, 180), f"{self.field('JobState')}: {log.exists() and log.read_text()}"

    def is_amid(self) -> bool:
        """Whether it is past its first epoch and still at work."""
        rows = self.folder / "history.csv"
        return rows.exists() and 1 < len(rows.read_text().splitlines()) <= EPOCHS

    def finish(self) -> None:
        """Wait for its end, which is to be a good one, in a later life than its first."""
        self.wait(lambda: self.field("JobState") not in ("RUNNING", "PENDING", "COMPLETING"))
        assert self.field("JobState") == "COMPLETED", (self.folder / "slurm.log").read_text()
        assert self.field("Restarts") != "0"
        assert json.loads((self.folder / "run.json").read_text())["status"] == "finished"
        # Header and one row an epoch: none is lost, none there twice.
        rows = (self.folder / "history.csv").read_text().splitlines()
        assert len(rows) == 1 + EPOCHS


def submit(project: Path, run: Run, runs: Path, *overrides: str) -> list[Job]:
    """Send what a command makes, and return its jobs."""
    done = run(project, "python", "train.py", *overrides, *JOB, *SHORT, f"runs_dir={runs}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scancel" in done.stdout
    return [Job(folder) for folder in sorted((runs / "digits").iterdir())]


@pytest.fixture(scope="module")
def limited(slurm: None, project: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of two ranks that comes to its time limit while the other tests run."""
    size = ["trainer=ddp", "trainer.devices=2", "launcher.time=30", "launcher.grace=10"]
    (job,) = submit(project, run, tmp_path_factory.mktemp("limited"), *size)
    job.wait(job.is_amid)
    hours, minutes, _ = map(int, job.field("RunTime").split(":"))
    asked("scontrol", "update", f"JobId={job.name}", f"TimeLimit={hours * 60 + minutes + 2}")
    return job


def test_a_requeued_job_ends_with_the_same_weights(
    limited: Job, project: Path, run: Run, tmp_path: Path
) -> None:
    """Stopped mid-epoch by `scontrol requeue`, it goes on by itself: bit for bit."""
    whole = tmp_path / "whole"
    words = ["trainer.accelerator=cpu", *SHORT, "callbacks.slow=null", f"run_dir={whole}"]
    done = run(project, "python", "train.py", *words)
    assert done.returncode == 0, done.stderr
    (job,) = submit(project, run, tmp_path / "runs")
    job.wait(job.is_amid)
    asked("scontrol", "requeue", job.name)
    job.finish()
    ours, known = (
        torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
        for folder in (job.folder, whole)
    )
    assert ours["global_step"] == known["global_step"]
    assert ours["state_dict"].keys() == known["state_dict"].keys()
    assert all(torch.equal(ours["state_dict"][k], v) for k, v in known["state_dict"].items())


def test_the_runs_of_a_sweep_are_requeued_and_cancelled_alone(
    limited: Job, project: Path, run: Run, tmp_path: Path
) -> None:
    """One array; the task that is warned of its limit requeues itself, a cancelled one does not."""
    jobs = submit(project, run, tmp_path / "runs", "-m", "seed=1,2,3")
    assert len({job.name.partition("_")[0] for job in jobs}) == 1
    for job in jobs:
        job.wait(job.is_amid)
    cancelled, left, warned = jobs
    asked("scancel", cancelled.name)
    asked("scancel", "--signal=USR1", "--batch", warned.name)  # as SLURM does before the limit
    warned.finish()
    assert cancelled.field("JobState") == "CANCELLED"
    assert cancelled.field("Restarts") == left.field("Restarts") == "0"
    assert left.field("JobState") == "RUNNING"
    assert (cancelled.folder / "checkpoints/last.ckpt").exists()


def test_a_job_at_its_limit_goes_back_to_the_queue(limited: Job) -> None:
    """Both ranks save when SLURM warns them, and finish of their own accord in a second life."""
    limited.finish()
    assert json.loads((limited.folder / "run.json").read_text())["world_size"] == 2
    assert len(list(limited.folder.parent.iterdir())) == 1


def test_what_slurm_refuses_is_one_line(
    slurm: None, project: Path, run: Run, tmp_path: Path
) -> None:
    """SLURM's own reason is passed on."""
    odd = ["launcher.partition=nowhere", f"runs_dir={tmp_path}"]
    done = run(project, "python", "train.py", *JOB, *odd)
    assert done.returncode == 1
    assert re.fullmatch(r"error: sbatch refused the job: .*partition.*\n", done.stderr)
