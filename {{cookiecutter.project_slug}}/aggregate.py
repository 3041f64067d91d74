"""Sum up runs that differ in seed and fold: `python aggregate.py runs=<folder>`."""

import hydra
from omegaconf import DictConfig

from {{ cookiecutter.package_name }}.cli import checked, run_stage


@hydra.main(version_base="1.3", config_path="configs", config_name="aggregate")
@checked
def aggregate(config: DictConfig) -> None:
    """Load what the work needs once the config is known to be good."""
    from {{ cookiecutter.package_name }}.evaluation.aggregate import run

    run(config)


if __name__ == "__main__":
    run_stage(aggregate)
