"""From a command line to a checked config, or to one readable line. No torch here."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import wraps
from importlib.util import find_spec
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from .errors import UserError, nearest, user_error
from .paths import ROOT, find_checkpoint, from_root

OmegaConf.register_new_resolver("from_root", lambda path: str(from_root(path)), replace=True)


# Run folders and logs are the project's own, so Hydra is told to write none.
HYDRA_SETTINGS = (
    "hydra.run.dir=.",
    "hydra.sweep.dir='${from_root:${runs_dir}}/sweeps/${now:%Y-%m-%d_%H-%M-%S}'",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra.job.chdir=false",
    "hydra.job_logging.root=null",
    "hydra.hydra_logging.root=null",
)
# What is left to do once the last job of a sweep has run, whether or not one has failed.
at_end = ExitStack()


def run_stage(stage: Callable[[], None]) -> None:
    """Run a `hydra.main` function; a mistake of the user ends it with one line and exit code 1."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors to us instead of printing them
    # Beside the other overrides: argparse takes them in one piece.
    typed = [i for i, word in enumerate(sys.argv) if "=" in word and not word.startswith("-")]
    place = max(typed, default=len(sys.argv) - 1) + 1
    sys.argv[place:place] = HYDRA_SETTINGS
    try:
        with at_end:
            stage()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except Exception as error:
        if (line := one_line(error, stage.__name__)) is None:
            raise
        sys.exit(line)


def checked(stage: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    """Check the config before a stage runs, and say its user's mistakes in one line."""

    @wraps(stage)
    def run(config: DictConfig) -> None:
        try:
            check(config)
            stage(config)
        except Exception as error:
            line = one_line(error, stage.__name__)
            if HydraConfig.get().mode == RunMode.RUN and line is not None:
                sys.exit(line)  # else Hydra prints lines of its own first
            raise  # to Hydra: the other jobs of a sweep go on

    return run


def one_line(error: Exception, stage: str, typed: Sequence[str] | None = None) -> str | None:
    """What to tell the user; None for an error that deserves its traceback.

    Args:
        error: What a stage raised, or composing its config.
        stage: Its name.
        typed: Its overrides; None for those of the command line.
    """
    typed = sys.argv[1:] if typed is None else typed
    if known := user_error(error):
        return f"error: {known}"
    if isinstance(error, InstantiationException):
        return None
    if isinstance(error, ValueError) and "Config group override" in str(error):
        words = [w for w in typed if w.endswith("=null") and w not in HYDRA_SETTINGS]
        return f"error: {' '.join(words)}: a group takes one of its options, not null."
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return f"error: {explain(error, stage, typed)}"
    return None


def check(config: DictConfig) -> None:
    """Refuse a config that cannot work here, before anything heavy is imported.

    Raises:
        UserError: If a value is missing, a package that a choice needs is not installed, or
            `run`, `init_from` or `resume` leads to no checkpoint.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UserError(f"{missing[0]} has no value: add {missing[0]}=… to the command.")
    for module, package in config.requires.items():
        if find_spec(module) is None:
            raise UserError(f"this choice needs {module}, not installed: pip install {package}")
    for key in ("run", "init_from", "resume"):
        if config.get(key) not in (None, "auto"):
            find_checkpoint(config[key], key=key)


def explain(error: Exception, stage: str, typed: Sequence[str]) -> str:
    """One line that says what is wrong and what to do.

    Args:
        error: What Hydra or OmegaConf raised.
        stage: The name of the stage's config, in which the nearest key is looked for.
        typed: The overrides.
    """
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        known = ", ".join(error.options)
        return f"{group}={option}: no such option.{nearest(option, error.options)} ({known})"
    if isinstance(error, OverrideParseException):
        first = text.splitlines()[0]
        return f"cannot read {error.override!r}: {first} Quote odd values twice: 'key=\"value\"'"
    if isinstance(error, MissingMandatoryValue):
        return text.splitlines()[0]
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match[1].partition("@")[0]
        return f"there is no {key} in the config.{nearest(key, known_keys(stage, typed))}"
    return " ".join(text.split())


def known_keys(stage: str, typed: Sequence[str]) -> list[str]:
    """Every dotted key of a stage's config, and its config groups."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose(stage, overrides=_choices(typed))
    groups = [path.name for path in (ROOT / "configs").iterdir() if path.is_dir()]
    return [*_dotted(OmegaConf.to_container(config)), *groups]


def _choices(overrides: Sequence[str]) -> list[str]:
    """The overrides that choose an option of a group and would compose."""
    pairs = [override.partition("=") for override in overrides]
    return [f"{g}={o}" for g, _, o in pairs if (ROOT / "configs" / g / f"{o}.yaml").is_file()]


def _dotted(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _dotted(value, f"{prefix}{key}.")
