"""What a training run leaves behind, and what its options change."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHORT, Done, Run, composed, path_override
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import OmegaConf
from tensorboard.backend.event_processing import event_accumulator

from {{ cookiecutter.package_name }}.errors import UserError
from {{ cookiecutter.package_name }}.models import network
from {{ cookiecutter.package_name }}.training.fit import fit

PLAIN = (int, float, str, bool, type(None))
Fitted = Callable[..., Path]


@pytest.fixture
def fitted(tmp_path: Path, prepared: Path) -> Fitted:
    """Fit in this process and return the run folder."""

    def fitted(*overrides: str) -> Path:
        config = composed("train", "trainer=cpu", *SHORT, *overrides)
        config.data.prepared_dir = str(prepared)
        config.trainer.enable_progress_bar = False
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        OmegaConf.resolve(config)
        OmegaConf.save(config, folder / "config.yaml")
        fit(folder)
        return folder

    return fitted


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def board_of(run: Path) -> Any:
    """What TensorBoard would show of a run."""
    board = event_accumulator.EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    return board


def epochs(run: Path) -> list[int]:
    with (run / "history.csv").open(newline="", encoding="utf-8") as stream:
        return [int(row["epoch"]) for row in csv.DictReader(stream)]


def assert_plain(node: Any) -> None:
    """Tensors and builtins all the way down."""
    if isinstance(node, dict):
        for key, value in node.items():
            assert isinstance(key, PLAIN)
            assert_plain(value)
    elif isinstance(node, list | tuple):
        for value in node:
            assert_plain(value)
    else:
        assert isinstance(node, torch.Tensor) or type(node) in PLAIN, type(node)


@pytest.mark.slow
def test_run_folder_keeps_its_contract(trained: Path, training: Done) -> None:
    text = (trained / "config.yaml").read_text(encoding="utf-8")
    assert "${" not in text
    config = OmegaConf.create(text)
    assert config.run_dir == str(trained)
    assert config.model.widths == [256, 128]

    facts = read_json(trained / "run.json")
    assert facts["status"] == "finished"
    assert facts["start"] <= facts["end"]
    assert facts["seed"] == 42
    assert facts["world_size"] == 1
    assert facts["packages"]["torch"] == torch.__version__
    assert "model=mlp" in facts["command"]
    assert facts["hardware"]["cores"] >= 1
    assert len(facts["data"]["fingerprint"]) == 64
    assert {"commit", "dirty"} == facts["git"].keys()

    metrics = read_json(trained / "metrics.json")
    names = {f"{split}/{name}" for split in ("train", "val", "test") for name in ("loss", "acc")}
    assert names <= metrics.keys()
    assert all(type(value) is float for value in metrics.values())
    assert metrics["test/acc"] > 0.9
    assert f"test/acc {metrics['test/acc']:.4f}" in training.stdout

    for name in ("best", "last"):
        file = trained / f"checkpoints/{name}.ckpt"
        assert file.is_file()
        assert not file.is_symlink()
    assert len(list((trained / "checkpoints").iterdir())) == 2
    assert "epoch 5/5" in (trained / "train.log").read_text(encoding="utf-8")
    assert epochs(trained) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_published_model_is_complete(trained: Path) -> None:
    published = trained.parent / "published"
    assert sorted(path.name for path in published.iterdir()) == [
        "best.ckpt",
        "history.csv",
        "metrics.json",
    ]
    assert read_json(published / "metrics.json") == read_json(trained / "metrics.json")
    best = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    content = torch.load(published / "best.ckpt", weights_only=True)
    assert all(content["state_dict"][key].equal(best[key]) for key in best)
    assert "optimizer_states" not in content
    assert network.load_model(published).classes == [str(digit) for digit in range(10)]


@pytest.mark.slow
def test_published_model_is_no_state_to_resume(run: Run, trained: Path) -> None:
    done = run("train.py", path_override("resume", trained.parent / "published"))
    assert done.returncode == 1
    assert "best.ckpt holds a model alone: init_from=" in done.stderr


@pytest.mark.slow
def test_checkpoint_is_plain(trained: Path) -> None:
    content = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)
    last = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 5 * 18
    assert content["global_step"] <= last["global_step"]
    assert_plain(content)
    assert all(key.startswith("network.") for key in content["state_dict"])
    assert not any("_orig_mod" in key for key in content["state_dict"])
    assert content["hyper_parameters"]["net"]["widths"] == [256, 128]


@pytest.mark.slow
def test_tensorboard_has_curves_and_pictures(trained: Path) -> None:
    board = board_of(trained)
    scalars = set(board.Tags()["scalars"])
    assert {"train/loss", "train/acc", "val/loss", "val/acc", "test/acc"} <= scalars
    assert any(tag.startswith("lr-") for tag in scalars)
    assert {"val/confusion", "val/worst_mistakes"} <= set(board.Tags()["images"])
    hparams = board.SummaryMetadata("_hparams_/session_start_info")
    assert b"model/widths" in hparams.plugin_data.content
    steps = [event.step for event in board.Scalars("val/acc")]
    assert steps == sorted(steps)
    assert steps[:5] == [17, 35, 53, 71, 89]


@pytest.mark.slow
def test_seed_decides(trained: Path, fitted: Fitted) -> None:
    again, other = fitted(), fitted("seed=0")
    assert read_json(again / "metrics.json") == read_json(trained / "metrics.json")
    assert read_json(other / "metrics.json") != read_json(trained / "metrics.json")
    assert read_json(fitted("seed=0") / "metrics.json") == read_json(other / "metrics.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [
        "precision=bf16",
        "precision=bf16_true",
        "callbacks=ema",
        "optimizer=sgd",
        "optimizer=adam",
        "trainer.accumulate_grad_batches=4",
        "task.class_weights=balanced",
        "loss.label_smoothing=0.1",
        "data.num_workers=2",
        "trainer.deterministic=true",
        "trainer.val_check_interval=0.5",
        "monitor=val/loss mode=min",
        "monitor=train/loss mode=min",
        "callbacks.early_stopping=null callbacks.pictures=null callbacks.progress=null",
        "test=false",
    ],
)
def test_choices_learn(choice: str, fitted: Fitted) -> None:
    run = fitted(*choice.split())
    metrics = read_json(run / "metrics.json")
    assert metrics["val/acc"] > 0.8
    assert ("test/acc" in metrics) == (choice != "test=false")
    assert_plain(network.read_checkpoint(run / "checkpoints/best.ckpt"))
    assert network.load_model(run).mean.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "last"),
    [("none", 1), ("plateau", 1), ("cosine_warmup", 0.01), ("onecycle", 0)],
)
def test_schedulers_step_at_their_interval(scheduler: str, last: float, fitted: Fitted) -> None:
    run = fitted(f"scheduler={scheduler}", "trainer.max_epochs=2", "trainer.log_every_n_steps=1")
    (state,) = network.read_checkpoint(run / "checkpoints/last.ckpt")["optimizer_states"]
    lr = composed("train").optimizer.lr
    assert state["param_groups"][0]["lr"] == pytest.approx(lr * last, abs=0.005 * lr)
    board = board_of(run)
    tag = next(tag for tag in board.Tags()["scalars"] if tag.startswith("lr-"))
    rates = {round(event.value, 9) for event in board.Scalars(tag)}
    assert (len(rates) > 30) == (scheduler in ("cosine_warmup", "onecycle"))


class Poison(Callback):
    """Spoils the weights in the middle of the third epoch."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 2 and batch_idx == 3:
            for weight in pl_module.parameters():
                weight.data.fill_(torch.nan)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_spoils_no_checkpoint(fitted: Fitted, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not finite"):
        fitted(f"+callbacks.poison._target_={Poison.__module__}.Poison")
    run = tmp_path / "run0"
    assert epochs(run) == [0, 1]
    for name in ("best", "last"):
        model = network.load_model(run / f"checkpoints/{name}.ckpt")
        assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.slow
def test_resume_goes_on(run: Run, tmp_path: Path) -> None:
    place = path_override("run_dir", tmp_path / "one")
    again = run("train.py", *SHORT, place, "resume=auto", "trainer.max_epochs=2")  # nothing yet
    assert again.returncode == 0, again.stderr
    assert epochs(tmp_path / "one") == [0, 1]
    refused = run("train.py", *SHORT, place)
    assert refused.returncode == 1
    assert refused.stderr.strip().endswith("add resume=auto to go on.")
    longer = run(
        "train.py", *SHORT, path_override("resume", tmp_path / "one"), "allow_changes=true"
    )
    assert longer.returncode == 0, longer.stderr
    assert epochs(tmp_path / "one") == [0, 1, 2, 3, 4]
    assert "epoch 3/5" in longer.stdout
    assert "epoch 2/5" not in longer.stdout
