"""What `launcher=slurm` sends and refuses, and what its job does when SLURM signals it.

SLURM's commands are stood in for by scripts that write down how they were called.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, Run

SEND = ["launcher=slurm", "trainer=ddp", "trainer.accelerator=gpu", "trainer.devices=4"]
RECORD = 'printf "%s\\n" "$@" >>"$HERE/{name}.told"\n'


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the front of PATH, in which an sbatch accepts every job."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("HERE", str(tmp_path))
    stand_in(folder, "sbatch", "echo 42")
    return folder


def stand_in(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text("#!/bin/bash\n" + RECORD.format(name=name) + body + "\n", encoding="utf-8")
    file.chmod(0o755)


def told(folder: Path, name: str) -> list[str]:
    """The arguments that a command was called with."""
    file = folder / f"{name}.told"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def test_a_run_becomes_a_job(commands: Path, run: Run, tmp_path: Path) -> None:
    size = ["launcher.nodes=2", "launcher.time=02:00:00", "launcher.mem=64G", "launcher.qos=short"]
    done = run("train.py", *SEND, *size, "launcher.options=['--exclusive','--comment=a b']")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs/digits").iterdir()
    arguments = told(tmp_path, "sbatch")
    assert arguments[-2:] == [str(ROOT / "cluster/slurm.sh"), str(folder)]
    asked = "nodes=2 time=02:00:00 mem=64G qos=short ntasks-per-node=4 gpus-per-node=4 exclusive"
    assert {f"--{option}" for option in [*asked.split(), "comment=a b"]} <= set(arguments)
    assert f"--output={folder}/slurm.log" in arguments
    assert not any(argument.startswith("--partition") for argument in arguments)
    assert (folder / "slurm.job").read_text(encoding="utf-8") == "42\n"
    assert "scancel 42" in done.stdout
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"] == "submitted"
    assert not (folder / "checkpoints").exists()


def test_a_sweep_becomes_an_array(commands: Path, run: Run, tmp_path: Path) -> None:
    done = run("train.py", *SEND, "seed=1,2,3", "trainer.devices=4,auto", "-m")
    assert done.returncode == 1  # of the six jobs three were refused, and keep none back
    assert done.stderr.splitlines()[-1].startswith("error: trainer.devices=auto")
    arguments = told(tmp_path, "sbatch")
    assert arguments.count("--parsable") == 1
    assert "--array=0-2" in arguments
    for task, folder in enumerate(map(Path, arguments[-3:])):
        assert (folder / "slurm.job").read_text(encoding="utf-8") == f"42_{task}\n"
        assert f"seed: {task + 1}\n" in (folder / "config.yaml").read_text(encoding="utf-8")


def test_a_command_can_be_seen_before_it_is_sent(commands: Path, run: Run, tmp_path: Path) -> None:
    done = run("train.py", *SEND, "trainer.accelerator=cpu", "launcher.submit=false")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("sbatch "))
    assert "--ntasks-per-node=4" in shlex.split(line)
    assert "--gpus" not in line
    assert not told(tmp_path, "sbatch")


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("trainer.devices=auto", "trainer.devices=auto: say how many .* trainer.devices=4"),
        ("trainer.devices=-1", "trainer.devices=-1"),
        ("data.batch_size=62", "data.batch_size=62 .* take 60 or 64"),
        ("launcher.nodes=0", "launcher.nodes=0: take a whole number"),
        ("launcher.grace=null", "launcher.grace=None"),
        ("trainer.num_nodes=2", "set launcher.nodes alone"),
        ("trainer=auto launcher.nodes=2", "needs trainer=ddp or trainer=fsdp"),
        ("launcher.time=2h", "launcher.time=2h: take minutes, HH:MM:SS"),
        ("launcher.time=1:30", "launcher.grace=120 seconds"),
        ("launcher.time=0-00:01 launcher.grace=60", "launcher.grace=60 seconds"),
    ],
)
def test_what_slurm_could_not_run_is_refused(
    choice: str, said: str, commands: Path, run: Run, tmp_path: Path
) -> None:
    done = run("train.py", *SEND, *choice.split())
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(f"error: .*{said}", line)
    assert not told(tmp_path, "sbatch")


def test_what_sbatch_says_is_passed_on(commands: Path, run: Run) -> None:
    refusal = "echo 'sbatch: error: invalid account' >&2; echo 'sbatch: error: No job' >&2; exit 1"
    stand_in(commands, "sbatch", refusal)
    done = run("train.py", *SEND)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: sbatch refused the job: invalid account No job"]


def test_without_slurm_nothing_is_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    done = run("train.py", *SEND)
    assert done.returncode == 1
    assert done.stderr.startswith("error: sbatch is not installed here")


@pytest.mark.parametrize("array", [False, True], ids=["job", "array"])
@pytest.mark.parametrize("case", ["warned", "warned too early", "cancelled"])
def test_a_job_requeues_itself_at_its_limit_alone(
    case: str, array: bool, commands: Path, tmp_path: Path
) -> None:
    runs = [tmp_path / name for name in ("a", "b (é)")]
    for folder in runs:
        (folder / "checkpoints").mkdir(parents=True)
    saves = case != "warned too early"
    save = shlex.quote(f"touch {shlex.quote(str(runs[1] / 'checkpoints/last.ckpt'))}; exit 143")
    # A step that saves once it is told to, and ends with 143.
    wait = 'echo $$ >"$HERE/pid"; while :; do sleep 0.1; done'
    stand_in(commands, "srun", f"trap {save if saves else repr('exit 143')} TERM; {wait}")
    stand_in(commands, "scancel", 'kill -TERM "$(cat "$HERE/pid")"')
    stand_in(commands, "scontrol", "")
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"} if array else {}
    job = subprocess.Popen(
        ["bash", str(ROOT / "cluster/slurm.sh"), *map(str, runs if array else runs[1:])],
        env={**os.environ, "SLURM_JOB_ID": "7", **task},
    )
    while not (tmp_path / "pid").exists():
        time.sleep(0.05)
        assert job.poll() is None
    if case == "cancelled":  # SLURM signals the script and the step
        job.send_signal(signal.SIGTERM)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    else:
        job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 143
    name = "7_1" if array else "7"
    assert told(tmp_path, "scancel") == ([] if case == "cancelled" else ["--signal=TERM", name])
    assert told(tmp_path, "scontrol") == (["requeue", name] if case == "warned" else [])
    started = told(tmp_path, "srun")
    assert started[started.index("--config-path") + 1] == str(runs[1])
    said = (runs[1] / "slurm.log").read_text(encoding="utf-8")
    assert ("Not requeued" in said) == (case == "warned too early")
