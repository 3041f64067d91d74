"""Released models: `<name>@<version>`, a git tag by gto and a file that DVC keeps.

`python -m <package>.registry v1.2.3` releases the pipeline's model, as `make release` does.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .errors import UserError, nearest
from .paths import ROOT

MODEL = "model"  # the entry of dvc.yaml that `make release` releases


def fetch(name: str, version: str, key: str = "run") -> Path:
    """The checkpoint of a release, kept in `runs/registry` from the first time on.

    Args:
        name: Of an artifact in dvc.yaml.
        version: A version, such as v1.2.3, or `latest`.
        key: The config key that it was given to, for errors.

    Raises:
        UserError: If there is no such release, or DVC cannot fetch it.
    """
    typed = f"{key}={name}@{version}"
    if name not in (known := artifacts()):
        listed = ", ".join(known) or "none"
        raise UserError(
            f"{typed}: dvc.yaml names no artifact {name}.{nearest(name, known)} ({listed})"
        )
    if not (file := _place(name, version)).is_file():
        version = _find_version(name, version, typed)
        file = _place(name, version)
    if not file.is_file():
        _download(name, version, file, typed)
    return file


def artifacts() -> dict[str, Any]:
    """The `artifacts` of dvc.yaml, by name."""
    file = ROOT / "dvc.yaml"
    content: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    return content.get("artifacts") or {}


def release(version: str) -> None:
    """Tag the commit that is checked out as a version of the pipeline's model.

    Raises:
        UserError: If something is not committed, the model is not in the remote, or gto refuses.
    """
    from gto.api import register
    from gto.constants import semver
    from gto.exceptions import GTOException
    from scmrepo.exceptions import SCMError

    if not re.fullmatch(f"v{semver}", version):
        raise UserError(f"VERSION={version}: take a version such as v1.2.3.")
    if changed := _git("status", "--porcelain"):
        first = changed.splitlines()[0].split(maxsplit=1)[-1]
        raise UserError(
            f"a release is of a commit, and {first} is not committed: git commit first."
        )
    if MODEL not in artifacts():
        raise UserError(f"dvc.yaml names no artifact {MODEL}, whose path would be released.")
    _check_pushed(str(artifacts()[MODEL]["path"]))
    try:
        tag = register(str(ROOT), MODEL, "HEAD", version=version).tag
    except (GTOException, SCMError) as error:
        raise UserError(f"{str(error).removesuffix('.')}.") from error
    print(f"tagged {tag}: git push origin HEAD {tag} gives it to others")


def _place(name: str, version: str) -> Path:
    return ROOT / "runs/registry" / f"{name}@{version}" / "best.ckpt"


def _find_version(name: str, version: str, typed: str) -> str:
    from gto.api import show
    from gto.exceptions import ArtifactNotFound
    from scmrepo.exceptions import SCMError

    try:
        known = [str(one["version"]) for one in show(str(ROOT), name)]  # the newest first
    except ArtifactNotFound:
        known = []
    except SCMError as error:
        raise UserError(f"{typed}: versions are git tags, and {error}.") from error
    if not known:
        raise UserError(
            f"{typed}: {name} has no version here: git fetch --tags brings those of others, "
            "make release VERSION=v1.0.0 makes one."
        )
    if version == "latest":
        return known[0]
    if version not in known:
        raise UserError(
            f"{typed}: there is no such version ({', '.join(known)}): "
            "git fetch --tags brings new ones."
        )
    return version


def _download(name: str, version: str, file: Path, typed: str) -> None:
    from dvc.api import DVCFileSystem, artifacts_show

    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as folder:
        scratch = Path(folder) / file.name
        try:
            found = artifacts_show(name, version=version, repo=str(ROOT))
            DVCFileSystem(str(ROOT), rev=found["rev"]).get_file(found["path"], str(scratch))
        except Exception as error:  # whatever git, DVC or the remote's own library meets
            raise UserError(
                f"{typed}: DVC cannot fetch it ({_line(error)}): "
                f"was it pushed? `dvc push` where it was trained."
            ) from error
        scratch.replace(file)


def _check_pushed(path: str) -> None:
    from dvc.repo import Repo

    try:
        with Repo(str(ROOT)) as repo:
            (out,) = repo.find_outs_by_path(str(ROOT / path))
            recorded = bool(out.hash_info)
            status = repo.status(targets=[str(ROOT / path)], cloud=True)
    except Exception as error:  # as in _download
        raise UserError(f"cannot tell whether {path} was pushed: {_line(error)}.") from error
    if not recorded:
        raise UserError(f"dvc.lock knows no {path}: dvc repro first.")
    if set(status.values()) - {"deleted"}:  # that is: in the remote, not in the cache
        raise UserError(f"{path} is not in the remote: dvc push first.")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = " ".join((getattr(error, "stderr", None) or str(error)).split())
        raise UserError(f"a release is a git tag, and git says: {reason}") from error
    return done.stdout.strip()


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    try:
        release(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
