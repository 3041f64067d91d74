"""The pipeline's first stage: params.yaml → one resolved config a stage.

`python -m <package>.resolve` composes each stage's config with the overrides that params.yaml
holds for it, and writes `resolved/<stage>.yaml`, which the stage then runs from and DVC watches.
"""

import shlex
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from .cli import run_stage
from .errors import UserError
from .paths import ROOT

# Relative paths stay relative here: the files are the same on every machine.
OmegaConf.register_new_resolver("from_root", str, replace=True)


def resolve(stage: str, overrides: str) -> DictConfig:
    """A stage's config with every interpolation resolved, the same on every machine."""
    # local=none: what configs/local says of this machine has no place in a shared file.
    config = compose(stage, overrides=["local=none", *shlex.split(overrides or "")])
    OmegaConf.resolve(config)
    return config


def main() -> None:
    """Write resolved/<stage>.yaml for every stage in params.yaml."""
    params = OmegaConf.load(ROOT / "params.yaml")
    assert isinstance(params, DictConfig)
    folder = ROOT / "resolved"
    folder.mkdir(exist_ok=True)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for stage in sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")):
            if stage in params:
                config = resolve(stage, params[stage])
                _check_dataset(config, params.dataset, stage)
                write(folder / f"{stage}.yaml", config)


def write(path: Path, config: DictConfig) -> None:
    """Write a config, its keys in order, with a line that says where it comes from."""
    note = "# Written by `dvc repro` from params.yaml and configs/: change those instead.\n"
    path.write_text(note + OmegaConf.to_yaml(config), encoding="utf-8")


def _check_dataset(config: DictConfig, dataset: str, stage: str) -> None:
    if "data" in config and config.data.prepared_dir != f"data/prepared/{dataset}":
        raise UserError(
            f"params.yaml: {stage} uses {config.data.prepared_dir}, but dataset is {dataset}: "
            f"give {stage} the override "
            "data=${dataset}."
        )


if __name__ == "__main__":
    run_stage(main)
