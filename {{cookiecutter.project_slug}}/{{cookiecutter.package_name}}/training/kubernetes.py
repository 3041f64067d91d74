"""`launcher=kubernetes`: a manifest for Kubeflow Trainer, rendered from the run's config."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from ..errors import UserError
from ..log import console
from ..paths import ROOT, as_typed

# RFC 1123: what Kubernetes takes as a name.
LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
NAMES = {"namespace": LABEL, "claim": rf"{LABEL}(\.{LABEL})*"}
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?"
LONGEST = 40  # of 63: a pod's name is the job's and what JobSet appends


def submit(folder: Path, config: DictConfig) -> None:
    """Write the run's manifest, and say how to send it.

    Args:
        folder: The run folder, here; in the cluster it lies on the claim.
        config: Of the run, resolved.

    Raises:
        UserError: If Kubernetes would not take a value, before anything is written.
    """
    check(config)
    if config.resume and folder not in Path(config.resume).parents:
        raise UserError(f"resume={config.resume} is on this machine: pods cannot read it.")
    job = job_name(config.name, folder.name)
    manifest = folder / "kubernetes.yaml"
    manifest.write_text(render(config, job, folder.name), encoding="utf-8")
    file, where = shlex.quote(as_typed(manifest)), f"kubectl -n {config.launcher.namespace}"
    pods = f"jobset.sigs.k8s.io/jobset-name={job}"
    for line in (
        f"start       kubectl apply -f {file}",
        f"watch       {where} get trainjob/{job}",
        f"follow      {where} logs -f -l {pods},batch.kubernetes.io/job-completion-index=0",
        f"remove      kubectl delete -f {file}",
        f"run folder  {run_dir(config, folder.name)} in the pods, on claim {config.launcher.claim}",
    ):
        console.print(line, highlight=False, markup=False)


def check(config: DictConfig) -> None:
    """Refuse what Kubernetes, or the job, would refuse later.

    Raises:
        UserError: With the setting to change.
    """
    launcher = config.launcher
    if config.init_from:
        raise UserError(f"init_from={config.init_from} is on this machine: pods cannot read it.")
    for key, pattern in NAMES.items():
        if not re.fullmatch(pattern, str(launcher[key])):
            raise UserError(
                f"launcher.{key}={launcher[key]}: no name that Kubernetes takes (lower-case "
                "letters, digits and dashes)."
            )
    if not re.fullmatch(r"[^\s,]+", str(launcher.image or "")):
        raise UserError(f"launcher.image={launcher.image}: take the name of an image.")
    if not str(launcher.root).startswith("/"):
        raise UserError(f"launcher.root={launcher.root}: take an absolute path in the image.")
    for key in ("cpu", "memory", "shm"):
        if not re.fullmatch(QUANTITY, str(launcher[key])):
            raise UserError(f"launcher.{key}={launcher[key]}: take a quantity such as 4 or 16Gi.")
    for key, least in (("trainer.devices", 1), ("launcher.nodes", 1), ("launcher.restarts", 0)):
        value = OmegaConf.select(config, key)
        if not isinstance(value, int) or value < least:
            raise UserError(f"{key}={value}: take a whole number from {least}.")


def render(config: DictConfig, job: str, stamp: str) -> str:
    """The manifest: cluster/kubernetes.yaml with the values of a run.

    Args:
        config: Of the run.
        job: The name of the TrainJob.
        stamp: The name of the run folder.
    """
    inside = config.copy()
    inside.run_dir, inside.resume = run_dir(config, stamp), None
    facts = {
        "name": job,
        "config": OmegaConf.to_yaml(inside),
        "gpus": 0 if config.trainer.accelerator == "cpu" else config.trainer.devices,
    }
    template = (ROOT / "cluster/kubernetes.yaml").read_text(encoding="utf-8")
    documents = list(yaml.safe_load_all(template))
    values = OmegaConf.create({**config, "job": facts, "documents": documents})
    rendered = OmegaConf.to_container(values, resolve=True)
    assert isinstance(rendered, dict)
    return yaml.dump_all(rendered["documents"], Dumper=_Dumper, sort_keys=False, width=1000)


def run_dir(config: DictConfig, stamp: str) -> str:
    """The run folder as pods see it."""
    return f"{str(config.launcher.root).rstrip('/')}/runs/{config.name}/{stamp}"


def job_name(name: str, stamp: str) -> str:
    """A name that Kubernetes takes for a job and its service, made of a run's name and stamp."""
    tail = _dashed(stamp)[-24:].strip("-")
    head = _dashed(name)[: LONGEST - 1 - len(tail)].strip("-")
    joined = f"{head}-{tail}".strip("-")
    return joined if joined[:1].isalpha() else f"run-{joined}"[:LONGEST].strip("-")


def _dashed(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class _Dumper(yaml.SafeDumper):
    """Quotes what Kubernetes' YAML reads otherwise (1e3, y), and shows lines of text as lines."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write values out where they stand."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    plain = len(text) > 1 and text[0].isalpha()
    style = "|" if "\n" in text else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
