"""Sharded training: the numbers of one process, and checkpoints that any training reads."""

import csv
import json
import os
import pickle
import re
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Run, composed, overrides_for, path_override, python, python_here

from {{ cookiecutter.package_name }}.errors import UserError
from {{ cookiecutter.package_name }}.models import network as networks
from {{ cookiecutter.package_name }}.models.sharding import recompute_activations
from {{ cookiecutter.package_name }}.models.vit import ViT
from {{ cookiecutter.package_name }}.paths import find_checkpoint, is_sharded
from {{ cookiecutter.package_name }}.training import consolidate
from {{ cookiecutter.package_name }}.training.checkpoints import put_in_place
from {{ cookiecutter.package_name }}.training.shardable import check_sharding

# No dropout, and no schedule: for another number of epochs it would be another one.
SMALL = ["model=vit", "model.depth=2", "model.dim=32", "model.dropout=0", "scheduler=none"]
SMALL += ["data.batch_size=128", "data.augment.shift=0", "data.augment.rotation=0"]
SMALL += ["callbacks.pictures=null", "allow_changes=true"]
SMALL += ["+optimizer.eps=1e-3"]  # or Adam makes whole steps of gradients that are all rounding
TWO = ["trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2"]
TENSOR = [*TWO, "trainer.strategy.tensor_parallel_size=2"]
FOLDER = "trainer.strategy.save_distributed_checkpoint=true"


class Trainings:
    """Trainings that go on from one another, each in a folder of its own."""

    def __init__(self, place: Path, prepared: Path) -> None:
        self.place, self.words = place, [*overrides_for("train.py", place, prepared), *SMALL]

    def __call__(self, name: str, epochs: int, *words: str, resume: str | None = None) -> Path:
        """Train up to an epoch, from scratch or from a copy of the folder of another training."""
        folder = self.place / name
        if resume:
            shutil.copytree(self.place / resume, folder)
        ends = [f"trainer.max_epochs={epochs}", path_override("run_dir", folder), "resume=auto"]
        start = python if words else python_here  # ranks need processes anyway
        done = start(ROOT / "train.py", *self.words, *words, *ends, cwd=self.place)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("sharding"), prepared)


@pytest.fixture(scope="module")
def whole(train: Trainings) -> Path:
    """One process, uninterrupted."""
    return train("whole", 4)


@pytest.fixture(scope="module")
def sharded(train: Trainings) -> Path:
    """The first half, on two ranks, each of which writes its part of a checkpoint."""
    return train("sharded", 2, *TWO, FOLDER)


def assert_same_training(run: Path, known: Path) -> None:
    """The same epochs, and the same numbers in each, up to the order of additions."""
    tables = []
    for folder in (run, known):
        with (folder / "history.csv").open(newline="", encoding="utf-8") as stream:
            tables.append([{k: float(v) for k, v in row.items()} for row in csv.DictReader(stream)])
    ours, theirs = tables
    assert [row["epoch"] for row in ours] == [0, 1, 2, 3]
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(its, rel=1e-4)


def assert_same_checkpoint(run: Path, known: Path) -> None:
    """The same weights and optimizer state under the same names and numbers, in plain tensors."""
    ours, theirs = (
        networks.read_checkpoint(find_checkpoint(one, prefer="last")) for one in (run, known)
    )
    torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], atol=1e-5, rtol=0)
    mine, its = (one["optimizer_states"][0] for one in (ours, theirs))
    assert mine["param_groups"] == its["param_groups"]
    assert mine["state"].keys() == its["state"].keys()
    for number, state in its["state"].items():
        torch.testing.assert_close(mine["state"][number], state, atol=1e-5, rtol=0)
        assert all(type(value) is torch.Tensor for value in mine["state"][number].values())


@pytest.mark.slow
def test_tensor_parallel_ranks_do_what_one_process_does(train: Trainings, whole: Path) -> None:
    run = train("tensor", 4, *TENSOR)
    assert_same_training(run, whole)
    assert_same_checkpoint(run, whole)


@pytest.mark.slow
def test_a_run_goes_on_sharded_and_in_one_process_again(train: Trainings, whole: Path) -> None:
    train("start", 1)
    train("middle", 3, *TWO, resume="start")
    run = train("end", 4, resume="middle")
    assert_same_training(run, whole)
    assert_same_checkpoint(run, whole)


@pytest.mark.slow
def test_a_sharded_checkpoint_goes_on_with_another_mesh(
    train: Trainings, sharded: Path, whole: Path
) -> None:
    run = train("remeshed", 4, *TENSOR, FOLDER, resume="sharded")
    assert_same_training(run, whole)
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "best.ckpt",
        "last.ckpt",
    ]
    assert is_sharded(run / "checkpoints/last.ckpt")


@pytest.mark.slow
def test_consolidated_it_goes_on_in_one_process(
    train: Trainings, sharded: Path, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(sharded, train.place / "portable")
    done = python("-m", consolidate.__name__, train.place / "portable", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is one file now") == 2
    assert not done.stderr
    words = ["local=none", "device=cpu", path_override("run", train.place / "portable")]
    assert python_here(ROOT / "evaluate.py", *words, cwd=tmp_path).returncode == 0
    measured, tested = (
        json.loads((train.place / "portable" / name).read_text(encoding="utf-8"))
        for name in ("evaluate/metrics.json", "metrics.json")
    )
    for name in ("test/acc", "test/f1", "test/loss"):  # two ranks had tested the best checkpoint
        assert measured[name] == pytest.approx(tested[name], rel=1e-4)
    assert networks.load_model(train.place / "portable")(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    run = train("continued", 4, resume="portable")
    assert_same_training(run, whole)
    assert_same_checkpoint(run, whole)


@pytest.mark.slow
def test_whoever_needs_one_file_is_told_how_to_make_it(
    sharded: Path, run: Run, tmp_path: Path
) -> None:
    said = rf"error: .*best.ckpt is sharded.* python -m {consolidate.__name__} .*best.ckpt"
    done = run("evaluate.py", path_override("run", sharded))
    assert done.returncode == 1
    assert re.search(said, done.stderr)
    again = shutil.copytree(sharded, tmp_path / "again")
    done = run("train.py", *SMALL, path_override("run_dir", again), "resume=auto")
    assert done.returncode == 1
    assert re.search(said.replace("best", "last"), done.stderr)


@pytest.mark.slow
def test_a_damaged_or_hostile_folder_is_left_as_it_is(sharded: Path, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = shutil.copytree(sharded / "checkpoints/last.ckpt", tmp_path / "last.ckpt")
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(UserError, match="no checkpoint that can be read"):
        consolidate.consolidate(folder)
    assert not (tmp_path / "ran").exists()
    (folder / "meta.pt").unlink()
    with pytest.raises(UserError, match="no checkpoint that can be read"):
        consolidate.consolidate(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_folder_is_replaced_and_nothing_left_behind(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    for number in range(3):  # the third in place of a file
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        (scratch / str(number)).touch()
        put_in_place(scratch, target)
        assert [path.name for path in target.iterdir()] == [str(number)]
        assert list(tmp_path.iterdir()) == [target]
        if number == 1:
            shutil.rmtree(target)
            target.touch()


@pytest.mark.parametrize("model", ["cnn", "mlp", "resnet", "vit"])
def test_recomputed_activations_change_nothing(model: str) -> None:
    data = {"classes": list("abcd"), "shape": [1, 8, 8], "mean": [0.5], "std": [0.5]}
    plain = networks.build_network(dict(composed("train", f"model={model}").model), data)
    frugal = deepcopy(plain)
    recompute_activations(frugal)
    images, gradients = torch.rand(8, 1, 8, 8), []
    for network in (plain, frugal):
        torch.manual_seed(0)  # of dropout
        network(images).logsumexp(1).sum().backward()
        gradients.append({name: one.grad for name, one in network.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(frugal.state_dict(), plain.state_dict())  # running statistics too


def test_recomputing_needs_blocks() -> None:
    data = {"classes": list("abcd"), "shape": [1, 8, 8], "mean": [0.5], "std": [0.5]}
    network = networks.build_network(dict(composed("train", "model=mlp").model), data)
    network.net = torch.nn.Flatten()
    with pytest.raises(UserError, match="Flatten has no shardable_blocks"):
        recompute_activations(network)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("precision=fp16", "take precision=bf16"),
        ("trainer.precision=64-true", "take precision=bf16"),
        ("callbacks=ema", "leave callbacks=ema out"),
        ("trainer.sync_batchnorm=true", "set it to false"),
        (f"publish_dir=out {FOLDER}", "save_distributed_checkpoint=false"),
        ("trainer.strategy.tensor_parallel_size=4", "take 1 or 2 or 3 or 6"),
        ("trainer.strategy.tensor_parallel_size=auto", "take a number of ranks"),
        ("trainer.strategy.tensor_parallel_size=0", "take a number of ranks"),
        ("trainer.strategy.data_parallel_size=4", "take data_parallel_size=auto"),
    ],
)
def test_what_cannot_be_sharded_is_refused(choice: str, said: str) -> None:
    config = composed("train", "trainer=fsdp", "trainer.devices=6", *choice.split())
    with pytest.raises(UserError, match=said):
        check_sharding(config, 6)


def test_auto_gives_the_ranks_that_are_left_to_the_data() -> None:
    choice = ["trainer.devices=6", "trainer.strategy.tensor_parallel_size=2"]
    config = composed("train", "trainer=fsdp", *choice)
    check_sharding(config, 6)
    assert config.trainer.strategy.data_parallel_size == 3


@pytest.mark.slow
def test_tensor_parallel_ranks_need_a_model_with_a_plan(prepared: Path, tmp_path: Path) -> None:
    words = [*overrides_for("train.py", tmp_path, prepared), *TENSOR, "model=mlp"]
    done = python(ROOT / "train.py", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search("^error: .*size=2: MLP has no parallel_plan", done.stderr, re.M)


@pytest.mark.parametrize("options", [{"heads": 3}, {"heads": 2, "mlp_ratio": 0.5}])
def test_tensor_parallel_ranks_share_whole_heads_and_features(options: dict[str, float]) -> None:
    network = ViT([1, 8, 8], 4, dim=6, depth=1, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot share"):
        network.parallel_plan(2)
