"""`launcher=ray`, on a Ray of this machine that the tests start."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SHORT, composed, overrides_for, path_override, python

from {{ cookiecutter.package_name }}.errors import UserError
from {{ cookiecutter.package_name }}.training.ray import check_resources, train

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'ray[train]'")
pytestmark = pytest.mark.slow

TWO = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def on_ray() -> Iterator[list[str]]:
    """What makes train.py join a Ray, which ends with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        path = {"env_vars": {"PYTHONPATH": str(ROOT)}}  # wherever pytest was started
        ray.init("local", num_cpus=2, log_to_driver=False, runtime_env=path)
        address = ray.get_runtime_context().gcs_address
        yield ["launcher=ray", f"launcher.address='{address}'"]
        ray.shutdown()


def test_two_workers_train_stop_and_go_on(
    on_ray: list[str], prepared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a run (1)"
    words = [*overrides_for("train.py", tmp_path, prepared), "model=mlp", *on_ray, *TWO]
    words += [path_override("run_dir", folder), "resume=auto", "callbacks.early_stopping=null"]
    command = [sys.executable, str(ROOT / "train.py"), *words, "trainer.max_epochs=3000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as job:
        assert job.stdout is not None
        for line in job.stdout:  # as it is shown on the terminal
            if "epoch 2/3000" in line:
                break
        job.send_signal(signal.SIGTERM)
        rest = job.stdout.read()
    assert job.returncode == 143, rest
    assert read_json(folder / "run.json")["status"] == "stopped"
    done = len((folder / "history.csv").read_text(encoding="utf-8").splitlines()) - 1

    more = [f"trainer.max_epochs={done + 2}", "allow_changes=true"]
    end = python(ROOT / "train.py", *words, *more, cwd=tmp_path)
    assert end.returncode == 0, end.stdout + end.stderr
    epochs = re.findall(rf"epoch (\d+)/{done + 2}", end.stdout)
    assert epochs[-1] == str(done + 2)
    assert len(epochs) <= 3
    facts, metrics = read_json(folder / "run.json"), read_json(folder / "metrics.json")
    assert (facts["status"], facts["world_size"]) == ("finished", 2)
    assert metrics["test/acc"] > 0.8
    assert (folder / "checkpoints/best.ckpt").is_file()
    *_, measured, where, evaluate, resume = end.stdout.splitlines()
    assert f"test/acc {metrics['test/acc']:.4f}" in measured
    assert where.endswith(f"  {folder}")
    assert evaluate.startswith("evaluate ")
    assert resume.startswith("resume ")
    assert not (folder / "stop").exists()


def test_a_sweep_finishes_what_does_not_fail(
    on_ray: list[str], prepared: Path, tmp_path: Path
) -> None:
    words = [*overrides_for("train.py", tmp_path, prepared), *SHORT, *on_ray]
    sweep = ["monitor=val/ac,val/acc", "-m"]
    done = python(ROOT / "train.py", *words, *sweep, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: 1 of the sweep's runs failed: see above."
    folders = sorted((tmp_path / "runs/digits").iterdir())
    facts = [read_json(folder / "run.json") for folder in folders]
    assert sorted(one["status"] for one in facts) == ["failed", "finished"]
    for folder, one in zip(folders, facts, strict=True):
        failed = one["status"] == "failed"
        assert failed == ("val/ac: there is" in (folder / "output.log").read_text(encoding="utf-8"))
        assert failed != (folder / "metrics.json").exists()
        state = "failed: monitor=val/ac: there is no such metric" if failed else "finished"
        assert f"{folder.relative_to(tmp_path)}  {state}" in done.stdout


def test_ranks_that_fail_are_named(on_ray: list[str], tmp_path: Path) -> None:
    launcher = composed("train", "launcher=ray").launcher
    with pytest.raises(UserError, match="rank 0: exit code 1, see above"):
        train(tmp_path, launcher, {"CPU": 1}, 2)  # a folder without config.yaml
    assert "error: " in (tmp_path / "ray/rank-0.log").read_text(encoding="utf-8")


def test_what_can_never_be_placed_is_refused(on_ray: list[str]) -> None:
    with pytest.raises(UserError, match="3 ranks need 3 CPUs, this Ray has 2"):
        check_resources({"CPU": 1}, 3, None)
    check_resources({"CPU": 1}, 3, "auto")  # it may grow
