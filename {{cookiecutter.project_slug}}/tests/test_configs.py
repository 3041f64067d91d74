"""Every config composes and names what there is; a mistake is one line, and quick."""

import inspect
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, composed, python
from hydra.utils import get_object
from omegaconf import OmegaConf

from {{ cookiecutter.package_name }} import resolve
from {{ cookiecutter.package_name }}.errors import UserError

CONFIGS = ROOT / "configs"
STAGES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
OPTIONS = sorted(path for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "local")
HYDRA_OWN = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")


def stages_with(group: str) -> list[str]:
    """The stages whose defaults list has a group."""
    text = {stage: (CONFIGS / f"{stage}.yaml").read_text(encoding="utf-8") for stage in STAGES}
    return [stage for stage in STAGES if re.search(rf"^ +- {group}:", text[stage], re.MULTILINE)]


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    """Every part of a config that has a `_target_`."""
    if isinstance(node, dict):
        if node.get("_target_"):
            yield node
        for child in node.values():
            yield from nodes(child)


def said(done: Any) -> list[str]:
    """What a command printed, its imports left out."""
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if not line.startswith("import time:")]


@pytest.mark.parametrize("file", OPTIONS, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_option_composes_and_names_what_there_is(file: Path) -> None:
    stages = stages_with(file.parent.name)
    assert stages, f"no stage has {file.parent.name} in its defaults"
    for stage in stages:
        config = composed(stage, f"{file.parent.name}={file.stem}")
        if "???" not in file.read_text(encoding="utf-8"):  # left for other options to fill in
            OmegaConf.resolve(config)
        for module in config.requires:
            if find_spec(module) is None:
                pytest.skip(f"{module} is not installed")
        plain = OmegaConf.to_container(config)
        assert isinstance(plain, dict)
        # A launcher is called with a run folder and the config, not with its own keys.
        if (launcher := plain.pop("launcher", None)) and launcher["_target_"]:
            assert callable(get_object(launcher["_target_"]))
        for node in nodes(plain):
            known = {key for key in node if key not in HYDRA_OWN}
            if "prepared_dir" in known:
                # of the data group, for `prepare` alone
                known -= {"name", "source", "split", "strict"}
            if "nodes" in known:
                known = {"folder", "config"}  # a launcher reads the config
            inspect.signature(get_object(node["_target_"])).bind_partial(**dict.fromkeys(known))


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_script_that_shows_its_config(stage: str, tmp_path: Path) -> None:
    done = python("-X", "importtime", ROOT / f"{stage}.py", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert composed(stage).keys() <= shown.keys()
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train.py trainer.max_epoch=3", "max_epoch in .* Did you mean trainer.max_epochs?"),
        ("train.py data.augment.shft=0", "Did you mean data.augment.shift?"),
        ("train.py trainr=cpu", "Did you mean trainer?"),
        ("train.py model=resnt", "model=resnt.* Did you mean resnet? .*cnn, mlp, resnet, vit"),
        ("train.py model=resnet model.depth=[2]", "Did you mean model.depths?"),
        ("train.py experiment=basline", "Did you mean baseline?"),
        ("train.py model=mlp,cnn", "--multirun"),
        ("train.py model", "cannot read 'model'"),
        ("train.py name=a=(b", "cannot read 'name=a=(b'"),
        ("train.py data=base", "data.name"),
        ("train.py seed=???", "seed has no value: add seed="),
        ("train.py scheduler=null", "scheduler"),
        ("train.py resume=runs/none", "resume=runs/none"),
        ("evaluate.py", "run has no value: add run="),
        ("evaluate.py run=runs/none", "run=runs/none: there is no such folder or file"),
        ("evaluate.py run=. splt=val", "Did you mean split?"),
        ("evaluate.py run=.", "run=.: this folder holds no checkpoint"),
        ("predict.py run=.", "input has no value: add input="),
        ("predict.py run=. input=.", "run=.: this folder holds no checkpoint"),
        ("prepare.py data=digit", "Did you mean digits?"),
    ],
)
def test_a_mistake_is_one_line_before_torch(command: str, message: str, tmp_path: Path) -> None:
    script, *words = command.split()
    done = python("-X", "importtime", ROOT / script, *words, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = said(done)
    assert re.search("^error: .*" + message.replace("?", r"\?").replace("(", r"\("), line)
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    done = python(ROOT / "train.py", "+requires.no_such_module=no-such-package", cwd=tmp_path)
    assert done.returncode == 1
    assert said(done)[-1].endswith("no_such_module, not installed: pip install no-such-package")


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with the pipeline's params and configs, in which `resolve` may write."""
    for path in [*ROOT.glob("*.yaml"), *ROOT.glob("*.py")]:
        shutil.copy(path, tmp_path)
    for folder in (CONFIGS, Path(resolve.__file__).parent):
        shutil.copytree(folder, tmp_path / folder.name)
    monkeypatch.setattr(resolve, "ROOT", tmp_path)
    return tmp_path


def test_resolved_configs_are_the_same_everywhere(pipeline: Path) -> None:
    (pipeline / "configs/local").mkdir(exist_ok=True)
    (pipeline / "configs/local/default.yaml").write_text("runs_dir: /scratch/of/mine\n")
    resolve.main()
    first = {path.name: path.read_bytes() for path in (pipeline / "resolved").iterdir()}
    resolve.main()
    assert {path.name: path.read_bytes() for path in (pipeline / "resolved").iterdir()} == first
    stages = ("prepare", "train", "evaluate", "gate")
    assert first.keys() == {f"{stage}.{kind}" for stage in stages for kind in ("yaml", "sha256")}
    for text in map(bytes.decode, first.values()):
        assert "${" not in text
        assert not re.search(r": ['\"]?/", text)
        assert str(ROOT) not in text


def test_params_reach_the_resolved_configs(pipeline: Path) -> None:
    params = yaml.safe_load((pipeline / "params.yaml").read_text(encoding="utf-8"))
    params["train"] += " trainer.max_epochs=3 'name=two words'"
    (pipeline / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    resolve.main()
    config = yaml.safe_load((pipeline / "resolved/train.yaml").read_text(encoding="utf-8"))
    assert config["trainer"]["max_epochs"] == 3
    assert config["name"] == "two words"


def code(pipeline: Path, stage: str) -> set[str]:
    """The modules that `resolve` found a stage to import, below the package."""
    resolve.main()
    lines = (pipeline / f"resolved/{stage}.sha256").read_text(encoding="utf-8").splitlines()
    return {line.partition("  ")[2].partition("/")[2] for line in lines}


def test_resolve_finds_the_modules_that_a_config_names(pipeline: Path) -> None:
    set_params(pipeline, train="model=cnn")
    first = code(pipeline, "train")
    assert "models/cnn.py" in first
    assert not first & {"models/resnet.py", "models/mlp.py", "evaluation/evaluate.py"}
    before = yaml.safe_load((pipeline / "resolved/train.yaml").read_text(encoding="utf-8"))
    set_params(pipeline, train="model=resnet")
    assert "models/resnet.py" in code(pipeline, "train")
    assert "models/resnet.py" in code(pipeline, "evaluate")
    after = yaml.safe_load((pipeline / "resolved/train.yaml").read_text(encoding="utf-8"))
    assert before["code"] != after["code"]


def set_params(pipeline: Path, **values: Any) -> None:
    params = yaml.safe_load((pipeline / "params.yaml").read_text(encoding="utf-8"))
    text = yaml.safe_dump({**params, **values}, sort_keys=False)
    (pipeline / "params.yaml").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"train": "trainer.max_epoch=3"},
            "train: there is no trainer.max_epoch in the config. Did",
        ),
        (
            {"train": "experiment=baselin"},
            "train: experiment=baselin: no such option. Did you mean",
        ),
        ({"train": "name='x"}, "train: write overrides as you would type them"),
        ({"train": {"model": "mlp"}}, "train: write overrides as you would type them"),
        ({"dataset": "nope"}, "prepare: data=nope: no such option"),
        ({"evaluate": "metrics=null"}, "evaluate: metrics=null: a group takes one of its options"),
    ],
)
def test_a_mistake_in_the_params_is_one_line(
    values: dict[str, Any], message: str, pipeline: Path
) -> None:
    set_params(pipeline, **values)
    with pytest.raises(UserError) as error:
        resolve.main()
    assert str(error.value).startswith(f"params.yaml, {message}")


def test_params_of_two_data_sets_are_refused(pipeline: Path) -> None:
    set_params(pipeline, dataset="image_folder", train="data=digits")
    with pytest.raises(UserError, match=r"train uses data/prepared/digits"):
        resolve.main()


def test_data_whose_changes_nobody_would_notice_are_refused(pipeline: Path) -> None:
    elsewhere = "data.source.raw_dir=photos"
    set_params(pipeline, dataset="image_folder", prepare=elsewhere, train=elsewhere)
    with pytest.raises(UserError, match=r"reads photos, which the pipeline does not watch"):
        resolve.main()
    deps = (pipeline / "dvc.yaml").read_text(encoding="utf-8")
    watched = deps.replace("- data/raw/${dataset}", "- photos")
    (pipeline / "dvc.yaml").write_text(watched, encoding="utf-8")
    resolve.main()
