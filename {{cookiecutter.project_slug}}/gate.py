"""Hold an evaluated model against limits and the accepted one: `python gate.py`."""

import hydra
from omegaconf import DictConfig

from {{ cookiecutter.package_name }}.cli import checked, run_stage


@hydra.main(version_base="1.3", config_path="configs", config_name="gate")
@checked
def gate(config: DictConfig) -> None:
    """Load what the work needs once the config is known to be good."""
    from {{ cookiecutter.package_name }}.evaluation.gate import run

    run(config)


if __name__ == "__main__":
    run_stage(gate)
