"""A run that was stopped goes on as if it had not been, or says why it cannot."""

import csv
import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    ROOT,
    SHORT,
    Done,
    Run,
    composed,
    overrides_for,
    path_override,
    python,
    python_here,
)
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from {{ cookiecutter.package_name }}.errors import UserError
from {{ cookiecutter.package_name }}.training import checkpoints
from {{ cookiecutter.package_name }}.training.fit import scaled_lr

TROUBLE = "+callbacks.trouble._target_=trouble.Trouble"
# Everything that has a state: dropout, augmentation, a schedule, averaged weights.
WHOLE = ["model=mlp", "callbacks=ema", "trainer.max_epochs=3", "data.batch_size=128", TROUBLE]


class Train:
    """Trains into one folder, with trouble or without."""

    def __init__(self, folder: Path, prepared: Path) -> None:
        self.folder, self.prepared = folder, prepared

    def __call__(self, *words: str, trouble: str = "", anew: bool = False) -> Done:
        """Run train.py in this process, or `anew` in one of its own."""
        given = [*overrides_for("train.py", self.folder, self.prepared), *words]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TROUBLE", trouble)
            patch.setenv("PYTHONPATH", str(ROOT / "tests"))
            start = python if anew else python_here
            return start(ROOT / "train.py", *given, cwd=self.folder)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def state(folder: Path) -> dict[str, Any]:
    kept = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    return {key: kept[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")}


def history(folder: Path) -> list[dict[str, str]]:
    with (folder / "history.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Train:
    return Train(tmp_path_factory.mktemp("resume"), prepared)


@pytest.fixture(scope="module")
def whole(train: Train) -> Path:
    """A run that nothing disturbs: 9 batches an epoch."""
    folder = train.folder / "whole"
    done = train(*WHOLE, path_override("run_dir", folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    names = [name for name in events.Tags()["scalars"] if not name.startswith("hp")]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("at", ["0 0", "1 3", "1 8", "2 8"], ids=lambda at: at.replace(" ", "-"))
def test_stopped_and_resumed_is_as_if_it_had_not_been(at: str, train: Train, whole: Path) -> None:
    folder = train.folder / at.replace(" ", "-")
    command = [*WHOLE, path_override("run_dir", folder), "resume=auto"]
    done = train(*command, trouble=f"0 {at} SIGTERM")
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    assert "SIGTERM: saved at epoch" in done.stdout
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"
    # As a person does it; TensorBoard numbers the files of one process, and sorts them as words.
    done = train(*command, anew=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert same(state(folder), state(whole))
    assert history(folder) == history(whole)
    assert scalars(folder) == scalars(whole)
    manifest = json.loads((folder / "run.json").read_text())
    assert manifest["status"] == "finished"
    assert [part["status"] for part in manifest["earlier"]] == ["stopped"]


def test_a_schedule_by_plateau_and_a_validation_within_the_epoch(train: Train) -> None:
    more = ["scheduler=plateau", "trainer.val_check_interval=3", "data.num_workers=1"]
    runs = [train.folder / "plateau", train.folder / "plateau stopped"]
    commands = [[*WHOLE, *more, path_override("run_dir", run), "resume=auto"] for run in runs]
    assert train(*commands[0]).returncode == 0
    # Stopped twice: before a batch that follows a validation, and after the first resumed batch.
    assert train(*commands[1], trouble="0 1 5 SIGHUP").returncode == 143
    assert train(*commands[1], trouble="0 1 6 SIGUSR1").returncode == 143
    assert train(*commands[1]).returncode == 0
    assert same(state(runs[1]), state(runs[0]))


def test_ctrl_c_saves_and_exits_with_130(train: Train) -> None:
    folder = train.folder / "interrupted"
    done = train(*WHOLE, path_override("run_dir", folder), trouble="0 1 2 SIGINT")
    assert done.returncode == 130
    assert torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 12


def test_a_stop_before_the_first_step_leaves_nothing_to_clean_up(train: Train) -> None:
    command = [*WHOLE, path_override("run_dir", train.folder / "early"), "resume=auto"]
    assert train(*command, trouble="sanity").returncode == 143
    assert train(*command, trouble="0 0 1 SIGTERM").returncode == 143


@pytest.mark.parametrize("broken", [["last"], ["last", "best"]], ids="-".join)
def test_a_checkpoint_that_cannot_be_read_is_named(
    broken: list[str], run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "a run"
    command = [*SHORT, path_override("run_dir", folder), "resume=auto"]
    assert run("train.py", *command).returncode == 0
    for name in broken:
        path = folder / f"checkpoints/{name}.ckpt"
        path.write_bytes(path.read_bytes()[: -path.stat().st_size // 2])
    done = run("train.py", *command)
    assert "last.ckpt cannot be loaded" in done.stdout
    if "best" in broken:
        assert done.returncode == 1
        assert "none of its checkpoints can be read" in done.stderr.splitlines()[-1]
    else:
        assert done.returncode == 0, done.stderr


def test_a_flipped_bit_is_found(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    content = bytearray((trained / "checkpoints/last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "checkpoints/last.ckpt").write_bytes(content)
    with pytest.raises(UserError, match="none of its checkpoints"):
        checkpoints.newest_readable(tmp_path)


def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    checkpoints.SafeCheckpointIO().save_checkpoint({"step": 1}, path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*No space left"):
        checkpoints.SafeCheckpointIO().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded again"):
        checkpoints.SafeCheckpointIO().save_checkpoint({"path": tmp_path}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_another_config_is_refused_and_shown(run: Run, tmp_path: Path) -> None:
    folder = path_override("run_dir", tmp_path / "run")
    assert run("train.py", *SHORT, folder).returncode == 0
    changed = [*SHORT, folder, "resume=auto", "optimizer.lr=0.5", "trainer.max_epochs=6"]
    done = run("train.py", *changed)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "optimizer.lr: 0.003 → 0.5; trainer.max_epochs: 5 → 6" in line
    assert "allow_changes=true" in line
    done = run("train.py", *changed, "allow_changes=true")
    assert done.returncode == 0, done.stderr
    assert [row["epoch"] for row in history(tmp_path / "run")] == list("012345")
    # Where and how it runs is no change.
    done = run("train.py", *changed, "data.num_workers=1", "trainer.log_every_n_steps=1")
    assert done.returncode == 0, done.stderr


def test_a_schedule_that_cannot_be_stretched(run: Run, tmp_path: Path) -> None:
    words = ["model=mlp", "scheduler=onecycle", path_override("run_dir", tmp_path / "run")]
    assert run("train.py", *words, "trainer.max_epochs=1").returncode == 0
    more = ["resume=auto", "allow_changes=true", "trainer.max_epochs=2"]
    done = run("train.py", *words, *more)
    assert done.returncode == 1
    assert "cannot be stretched: init_from=" in done.stderr.splitlines()[-1]


def test_resume_auto_finds_the_unfinished_run_of_this_config(run: Run, tmp_path: Path) -> None:
    runs = tmp_path / "runs/digits"
    assert run("train.py", *SHORT, "resume=auto").returncode == 0
    (first,) = runs.iterdir()
    manifest = json.loads((first / "run.json").read_text())
    (first / "run.json").write_text(json.dumps({**manifest, "status": "running"}))
    assert run("train.py", *SHORT, "seed=1", "resume=auto").returncode == 0  # another config
    assert len(list(runs.iterdir())) == 2
    assert run("train.py", *SHORT, "resume=auto").returncode == 0
    assert len(list(runs.iterdir())) == 2
    assert json.loads((first / "run.json").read_text())["status"] == "finished"
    assert run("train.py", *SHORT, "resume=auto").returncode == 0  # all are finished
    assert len(list(runs.iterdir())) == 3


def test_a_run_that_early_stopping_ended_stays_ended(run: Run, tmp_path: Path) -> None:
    never = ["+callbacks.early_stopping.min_delta=10", "callbacks.early_stopping.patience=1"]
    command = [*SHORT, *never, path_override("run_dir", tmp_path / "run"), "resume=auto"]
    assert run("train.py", *command).returncode == 0
    before = history(tmp_path / "run")
    assert len(before) < 5
    done = run("train.py", *command)
    assert done.returncode == 0, done.stderr
    assert history(tmp_path / "run") == before


def test_the_same_command_continues_a_warm_start(train: Train, trained: Path) -> None:
    start = f'init_from="{os.path.relpath(trained, train.folder)}"'
    command = [*WHOLE, start, path_override("run_dir", train.folder / "warm"), "resume=auto"]
    assert train(*command, trouble="0 0 2 SIGTERM").returncode == 143
    done = train(*command, trouble="0 0 4 SIGTERM")
    assert done.returncode == 143, done.stderr


def test_a_folder_in_use_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run/.lock"):
        done = run("train.py", *SHORT, path_override("run_dir", tmp_path / "run"))
    assert done.returncode == 1
    assert "another process trains there" in done.stderr


def test_a_warm_start_takes_weights_alone(run: Run, tmp_path: Path, trained: Path) -> None:
    start = path_override("init_from", trained)
    none = ["trainer.max_epochs=1", "optimizer.lr=0", "test=false"]
    done = run("train.py", "model=mlp", start, *none, path_override("run_dir", tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    kept = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)
    best = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    weights = {k: v for k, v in kept["state_dict"].items() if k.endswith(("weight", "bias"))}
    assert all(torch.equal(value, best[key]) for key, value in weights.items())
    assert kept["epoch"] == 1
    done = run("train.py", "model=mlp", "model.widths=[64,32]", start, *none)
    assert done.returncode == 1
    assert "weights do not fit" in done.stderr
    done = run("train.py", "model=mlp", "model.widths=[64,32]", start, *none, "init_strict=false")
    assert done.returncode == 0, done.stderr
    assert "They start anew" in done.stdout
    done = run("train.py", "init_from=nowhere")
    assert done.stderr == "error: init_from=nowhere: there is no such folder or file.\n"


@pytest.mark.parametrize(("rule", "lr"), [("none", 0.003), ("linear", 0.012), ("sqrt", 0.006)])
def test_learning_rate_scaling(rule: str, lr: float) -> None:
    config = composed("train", "data.batch_size=256", f"lr_scaling={rule}", "lr_batch_size=64")
    assert scaled_lr(config) == pytest.approx(lr)
