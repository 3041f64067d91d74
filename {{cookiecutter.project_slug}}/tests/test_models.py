"""Networks: what goes in and out, that they learn, and what may be built."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import ROOT, composed
from omegaconf import OmegaConf
from torch import nn

from {{ cookiecutter.package_name }}.data.sources import Digits
from {{ cookiecutter.package_name }}.errors import UserError
from {{ cookiecutter.package_name }}.models.classifier import weights_of
from {{ cookiecutter.package_name }}.models.network import build_network
from {{ cookiecutter.package_name }}.training.fit import build_task

MODELS = sorted(path.stem for path in (ROOT / "configs/model").glob("*.yaml"))
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
HOME = build_network.__module__.rpartition(".")[0]  # <package>.models


class Elsewhere(nn.Linear):
    """A net that is none of the project's own."""

    def __init__(self, input_shape: list[int], num_classes: int) -> None:
        super().__init__(input_shape[-1], num_classes)


def net_of(model: str) -> dict[str, Any]:
    net = OmegaConf.to_container(composed("train", f"model={model}").model, resolve=True)
    assert isinstance(net, dict)
    return {str(key): value for key, value in net.items()}


def facts(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> dict[str, Any]:
    return {
        "classes": [f"class {index}" for index in range(classes)],
        "shape": list(shape),
        "mean": [0.4] * shape[0],
        "std": [0.3] * shape[0],
        "counts": {"train": [7] * classes},
    }


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 5, 7), (3, 32, 32), (3, 48, 40)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_fits_its_data(model: str, shape: tuple[int, ...]) -> None:
    network = build_network(net_of(model), facts(shape, classes=6)).eval()
    images = torch.randint(256, (3, *shape), dtype=torch.uint8)
    logits = network(images)
    assert logits.shape == (3, 6)
    assert logits.isfinite().all()
    torch.testing.assert_close(network(images / 255), logits)
    torch.testing.assert_close(network(images[:1]), logits[:1], atol=1e-4, rtol=1e-4)


def test_pixels_are_scaled_and_normalised() -> None:
    data = {**facts((3, 2, 2)), "mean": [0.1, 0.2, 0.3], "std": [0.5, 1.0, 2.0]}
    network = build_network(net_of("mlp"), data)
    network.net = nn.Identity()
    white = network(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8))
    expected = torch.tensor([1.8, 0.8, 0.35]).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    torch.testing.assert_close(white, expected)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_one_batch_by_heart(model: str) -> None:
    torch.manual_seed(0)
    digits = Digits()
    rows = [image for _, image in zip(range(32), digits.images(), strict=False)]
    images = torch.stack([torch.from_numpy(image) for image in rows])
    labels = torch.from_numpy(digits.labels[:32])
    network = build_network(net_of(model), facts())
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.003)
    for _ in range(120):
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 0.1
    assert (network.eval()(images).argmax(-1) == labels).all()


@pytest.mark.parametrize(
    ("model", "wrong", "said"),
    [
        ("vit", {"patch_size": 3}, "patch_size=3 does not divide 8×8"),
        ("vit", {"heads": 5}, "dim=96 is not a multiple of heads=5"),
        ("resnet", {"depths": [1, 1]}, "depths"),
        ("cnn", {"width": [8]}, "width"),
    ],
    ids=["patch", "heads", "depths", "unknown"],
)
def test_wrong_sizes_are_named(model: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_network({**net_of(model), **wrong}, facts())


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "torch.nn.Linear",
        f"{HOME}_of_another.Net",
        f"{HOME}.blocks.init_weights",  # the project's own, but no network
        f"{HOME}.blocks.nn.Linear",
        f"{HOME}.mlp.MLQ",
        f"{HOME}.nothing.Net",
        "Net",
        "",
    ],
)
def test_only_networks_of_the_project_are_built(target: str) -> None:
    with pytest.raises(UserError):
        build_network({"_target_": target}, facts())


def test_a_trusted_module_is_built_from(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("elsewhere")
    monkeypatch.setattr(module, "Net", Elsewhere, raising=False)
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    net = {"_target_": "elsewhere.Net"}
    with pytest.raises(UserError, match="trusted_modules"):
        build_network(net, facts())
    assert isinstance(build_network(net, facts(), ["elsewhere"]).net, Elsewhere)


@pytest.mark.parametrize("model", MODELS)
def test_biases_and_norms_do_not_decay(model: str) -> None:
    config = composed("train", f"model={model}", "optimizer=adamw", "scheduler=none")
    task = build_task(config, facts())
    optimizer = task.configure_optimizers()
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay.keys() == {id(weight) for weight in task.parameters()}
    for module in task.network.modules():
        for name, weight in module.named_parameters(recurse=False):
            spared = name == "bias" or isinstance(module, NORMS)
            assert decay[id(weight)] == (0 if spared else config.optimizer.weight_decay)


def test_balanced_weights_even_out_the_classes() -> None:
    counts = [10, 30, 60]
    weights = weights_of("balanced", counts)
    assert weights is not None
    torch.testing.assert_close(weights * torch.tensor(counts), torch.full((3,), 100 / 3))
    for wrong in ([1.0, 2.0], "balance"):
        with pytest.raises(UserError, match=r"balanced, or 3 numbers"):
            weights_of(wrong, counts)
