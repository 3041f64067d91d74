"""From the shell: evaluate, predict, what a run prints, sweeps, and runs that fail."""

import csv
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, SHORT, Done, Run, path_override, python
from PIL import Image

from {{ cookiecutter.package_name }}.data.arrays import ImageArrays
from {{ cookiecutter.package_name }}.models.network import load_model

pytestmark = pytest.mark.slow

FAST = ["model=mlp", "debug=fast"]
LOAD = """
import sys
sys.modules["hydra"] = sys.modules["omegaconf"] = None
import numpy as np, torch
load_model = __import__(sys.argv[1], fromlist=["load_model"]).load_model
images = torch.from_numpy(np.load("images.npy"))
with torch.inference_mode():
    np.save("logits.npy", load_model(sys.argv[2])(images).numpy())
"""


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def printed_command(done: Done, name: str) -> list[str]:
    """A command of a run's last lines, for this interpreter."""
    line = next(one for one in done.stdout.splitlines()[-4:] if one.startswith(f"{name} "))
    interpreter, *words = shlex.split(line.removeprefix(name))
    assert interpreter == "python"
    return words


@pytest.fixture(scope="session")
def images(prepared: Path) -> np.ndarray:
    """The first 20 images of the test split, uint8 [20, 1, 8, 8]."""
    arrays = ImageArrays(prepared)
    return np.array(arrays.images[arrays.splits["test"][:20]])


@pytest.fixture(scope="session")
def expected(trained: Path, images: np.ndarray) -> np.ndarray:
    """Probabilities [20, 10] that predict.py should come to."""
    with torch.inference_mode():
        return load_model(trained)(torch.from_numpy(images)).softmax(-1).numpy()


def check_predictions(file: Path, names: list[str], expected: np.ndarray) -> None:
    rows = read_csv(file)
    assert [row["input"] for row in rows] == names
    shares = [[float(row[f"p({digit})"]) for digit in range(10)] for row in rows]
    np.testing.assert_allclose(shares, expected, atol=2e-6)
    assert [row["class"] for row in rows] == [str(best) for best in expected.argmax(1)]
    assert [float(row["probability"]) for row in rows] == [max(one) for one in shares]


def test_printed_commands_run(training: Done, trained: Path, prepared: Path) -> None:
    where = trained.parent  # the commands are relative to it
    done = python(*printed_command(training, "evaluate"), cwd=where)
    assert done.returncode == 0, done.stderr
    metrics = read_json(trained / "evaluate/metrics.json")
    for name in ("acc", "f1", "loss"):
        told = read_json(trained / "metrics.json")[f"test/{name}"]
        assert metrics[f"test/{name}"] == pytest.approx(told, rel=1e-4)
    assert metrics["test/count"] == len(ImageArrays(prepared).splits["test"]) == 359
    table = read_csv(trained / "evaluate/per_class.csv")
    assert sum(int(row["count"]) for row in table) == 359
    pairs = read_csv(trained / "evaluate/confusion.csv")
    hits = [row["actual"] == row["predicted"] for row in pairs]
    assert np.mean(hits) == pytest.approx(metrics["test/acc"])
    with Image.open(trained / "evaluate/confusion.png") as picture:
        assert min(picture.size) > 300

    before = (trained / "checkpoints/best.ckpt").read_bytes()
    done = python(*printed_command(training, "resume"), cwd=where)  # it is finished: nothing to do
    assert done.returncode == 0, done.stderr
    assert "epoch 5/5" not in done.stdout
    assert (trained / "checkpoints/best.ckpt").read_bytes() == before
    assert read_json(trained / "run.json")["status"] == "finished"


def test_evaluate_measures_what_it_is_told(trained: Path, run: Run, tmp_path: Path) -> None:
    more = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "_partial_": "true"}
    words = [f"+metrics.top3.{key}={value}" for key, value in {**more, "top_k": 3}.items()]
    told = path_override("run", trained)
    done = run("evaluate.py", told, "out_dir=.", "loss.label_smoothing=0.2", *words)
    assert done.returncode == 0, done.stderr
    metrics, trained_with = (read_json(at / "metrics.json") for at in (tmp_path, trained))
    assert metrics["test/acc"] <= metrics["test/top3"] <= 1 + 1e-6
    assert metrics["test/loss"] > trained_with["test/loss"]


def test_evaluate_takes_another_split_and_a_checkpoint(
    trained: Path, run: Run, tmp_path: Path
) -> None:
    odd = tmp_path / "epoch=4-é (1).ckpt"
    odd.write_bytes((trained / "checkpoints/best.ckpt").read_bytes())
    done = run("evaluate.py", path_override("run", odd), "split=val", "out_dir=.", "batch_size=7")
    assert done.returncode == 0, done.stderr
    told = read_json(trained / "metrics.json")["val/acc"]
    assert read_json(tmp_path / "metrics.json")["val/acc"] == pytest.approx(told)
    done = run("evaluate.py", path_override("run", odd), "split=tset")
    assert done.returncode == 1
    assert done.stderr.strip() == "error: split=tset: take one of train, val, test."


def test_predict_reads_arrays_and_images(
    trained: Path, run: Run, tmp_path: Path, images: np.ndarray, expected: np.ndarray
) -> None:
    np.save(tmp_path / "digits.npy", images[:, 0])
    folder = tmp_path / "digits"
    (folder / "deeper").mkdir(parents=True)
    names = [f"deeper/{row:02}.png" if row < 5 else f"{row:02}.png" for row in range(20)]
    for image, name in zip(images, names, strict=True):
        Image.fromarray(image[0]).save(folder / name)
    order = sorted(range(20), key=lambda row: folder / names[row])
    model = path_override("run", trained)
    for source, rows, told in (
        ("digits.npy", list(range(20)), [str(row) for row in range(20)]),
        ("digits", order, [names[row] for row in order]),
        ("digits/05.png", [5], ["05.png"]),
    ):
        done = run("predict.py", model, f"input={source}", "output=out.csv", "batch_size=8")
        assert done.returncode == 0, done.stderr
        check_predictions(tmp_path / "out.csv", told, expected[rows])


def test_predict_names_what_it_cannot_read(trained: Path, run: Run, tmp_path: Path) -> None:
    model = path_override("run", trained)
    np.save(tmp_path / "large.npy", np.zeros((2, 1, 9, 9), np.uint8))
    done = run("predict.py", model, "input=large.npy")
    assert done.returncode == 1
    assert "the model takes uint8 [N, 1, 8, 8]" in done.stderr
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/bad.png").write_bytes(b"no image")
    Image.new("L", (8, 8)).save(tmp_path / "mixed/good.png")
    done = run("predict.py", model, "input=mixed")
    assert done.returncode == 1
    assert "bad.png: not a readable image" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "predictions.csv").exists()
    done = run("predict.py", model, "input=mixed", "on_unreadable=skip")
    assert done.returncode == 0, done.stderr
    assert [row["input"] for row in read_csv(tmp_path / "predictions.csv")] == ["good.png"]


def test_model_loads_without_hydra_and_data(
    trained: Path, tmp_path: Path, images: np.ndarray, expected: np.ndarray
) -> None:
    (tmp_path / "load.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{LOAD}")
    np.save(tmp_path / "images.npy", images)
    (tmp_path / "alone.ckpt").write_bytes((trained / "checkpoints/best.ckpt").read_bytes())
    done = python("load.py", load_model.__module__, "alone.ckpt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    logits = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    np.testing.assert_allclose(logits.softmax(-1).numpy(), expected, atol=1e-6)


def test_a_loss_that_is_not_finite_fails_in_one_line(run: Run, tmp_path: Path) -> None:
    done = run("train.py", *SHORT, "optimizer.lr=1e30")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the loss is not finite near step")
    assert "Traceback" not in done.stdout + done.stderr
    (folder,) = (tmp_path / "runs/digits").iterdir()
    facts = read_json(folder / "run.json")
    assert facts["status"] == "failed"
    assert "not finite" in facts["error"]
    assert "not finite" in (folder / "train.log").read_text(encoding="utf-8")


def test_a_typo_in_monitor_ends_before_the_first_epoch(run: Run, tmp_path: Path) -> None:
    done = run("train.py", *SHORT, "monitor=val/ac")
    assert done.returncode == 1
    assert "monitor=val/ac: there is no such metric. Did you mean val/acc?" in done.stderr
    assert "epoch 1/" not in done.stdout
    (folder,) = (tmp_path / "runs/digits").iterdir()
    assert not list(folder.rglob("*.ckpt"))


@pytest.mark.parametrize("debug", ["fast", "overfit", "limit", "profile"])
def test_every_debug_preset_runs(debug: str, run: Run, tmp_path: Path) -> None:
    done = run("train.py", "model=mlp", f"debug={debug}")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs/debug").iterdir()
    metrics = read_json(folder / "metrics.json")
    if debug == "overfit":
        assert metrics["train/acc"] == 1
    if debug == "profile":
        assert list((folder / "tensorboard").glob("*.pt.trace.json*"))


def test_fast_dev_run_promises_what_it_left(run: Run, tmp_path: Path) -> None:
    done = run("train.py", "model=mlp", "trainer.fast_dev_run=true")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs/digits").iterdir()
    promised = any(line.startswith("evaluate ") for line in done.stdout.splitlines())
    done = run("evaluate.py", path_override("run", folder))
    assert (done.returncode == 0) == promised


@pytest.mark.parametrize(
    ("split", "monitor"),
    [("test", "monitor=val/acc mode=max"), ("val", "monitor=train/loss mode=min")],
)
def test_data_without_a_split_train(split: str, monitor: str, run: Run, tmp_path: Path) -> None:
    place = path_override("data.prepared_dir", tmp_path / "prepared")
    done = run("train.py", *FAST, f"data.split.{split}=0", place, *monitor.split())
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs/debug").iterdir()
    assert f"{split}/acc" not in read_json(folder / "metrics.json")


def test_a_monitor_without_its_split_is_named(run: Run, tmp_path: Path) -> None:
    place = path_override("data.prepared_dir", tmp_path / "prepared")
    done = run("train.py", *FAST, "data.split.val=0", place)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: monitor=val/loss")
    assert "Traceback" not in done.stdout + done.stderr


def test_a_failing_job_of_a_sweep_leaves_the_others(run: Run, tmp_path: Path) -> None:
    done = run("train.py", *FAST, "seed=1,2", "model.dropout=0,7", "-m")
    assert done.returncode != 0
    runs = sorted((tmp_path / "runs/debug").iterdir())
    facts = [read_json(folder / "run.json") for folder in runs]
    assert [one["seed"] for one in facts] == [1, 1, 2, 2]
    assert [one["status"] for one in facts] == ["finished", "failed"] * 2
    for folder, one in zip(runs, facts, strict=True):
        failed = one["status"] == "failed"
        assert ("dropout" in (folder / "train.log").read_text(encoding="utf-8")) == failed
        assert (folder / "metrics.json").exists() != failed
        assert f"model.dropout={7 if failed else 0}" in one["command"]
    assert "dropout" in done.stderr.splitlines()[-1]


def test_runs_that_start_together_get_a_folder_each(tmp_path: Path) -> None:
    places = {"runs_dir": tmp_path, "data.prepared_dir": tmp_path / "prepared"}  # both prepare it
    words = [*FAST, "trainer=cpu", *(path_override(key, path) for key, path in places.items())]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    both = [subprocess.Popen(command, cwd=tmp_path) for _ in range(2)]
    assert [one.wait(timeout=600) for one in both] == [0, 0]
    folders = sorted((tmp_path / "debug").iterdir())
    first, second = (read_json(folder / "metrics.json") for folder in folders)
    assert first == second
