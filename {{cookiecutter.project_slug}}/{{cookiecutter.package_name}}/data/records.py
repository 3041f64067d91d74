"""Raw data under DVC: the record that git keeps of a folder, and whether the files are those."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ..errors import UserError
from ..log import log
from ..paths import ROOT, from_root
from .arrays import Meta


@dataclass(frozen=True)
class Record:
    """What `dvc add` wrote of a folder.

    Attributes:
        file: `<folder>.dvc`, which git keeps.
        md5: DVC's hash of the recorded files.
    """

    file: Path
    md5: str

    @property
    def folder(self) -> Path:
        """What is recorded."""
        return self.file.with_suffix("")

    @property
    def name(self) -> str:
        """The file as one types it at the project's root."""
        return self.file.relative_to(ROOT).as_posix()

    def md5_of_files(self) -> str:
        """DVC's hash of the files as they are now; it reads again only those that have changed.

        DVC's lock is not taken: a stage of `dvc repro` may ask.
        """
        from dvc.dvcfile import load_file
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        try:
            with Repo(str(ROOT), config={"core": {"no_scm": True}}) as repo:  # git may be absent
                (out,) = load_file(repo, str(self.file)).stage.outs
                return str(out.get_hash().value)
        except (DvcException, OSError) as error:
            raise UserError(f"{self.name}: DVC cannot compare files with it ({error}).") from error


def find_record(raw_dir: str | None) -> Record | None:
    """The record of a folder, or of one above it; None where there is none in the project."""
    folder = from_root(raw_dir) if raw_dir else ROOT
    while ROOT in folder.parents:
        file = folder.with_name(f"{folder.name}.dvc")
        if file.is_file():
            return _read(file)
        folder = folder.parent
    return None


def check_record(data: DictConfig, present: Meta | None) -> dict[str, str] | None:
    """Which version of the raw files arrays should be made from: `path` of the record and `md5`.

    Args:
        data: The `data` group of a config.
        present: The arrays that there are; they will do where raw files are absent.

    Returns:
        None where nothing records the raw files.

    Raises:
        UserError: If `data.strict` is set and this is not the recorded version, or there is nothing
            to make arrays from.
    """
    record = find_record(data.source.get("raw_dir"))
    if record is None:
        return None
    recorded, pull = {"path": record.name, "md5": record.md5}, f"dvc pull {record.name}"
    folder = record.folder.relative_to(ROOT)
    if record.folder.exists():
        found = {**recorded, "md5": record.md5_of_files()}
        if found != recorded:
            _complain(
                f"{folder} differs from its record {record.name}: {pull} brings what it records, "
                f"dvc add {folder} records what is there.",
                data.strict,
            )
        return found
    if present is None:
        raise UserError(f"{folder} is not here: {pull} brings its files.")
    if present.record != recorded:
        _complain(
            f"{data.prepared_dir} was not made from the files that {record.name} records: "
            f"{pull} brings those.",
            data.strict,
        )
    return present.record


def _read(file: Path) -> Record | None:
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(content, dict)
        md5 = content["outs"][0].get("md5")
    except Exception as error:  # whatever the parser or a merge conflict leads to
        name = file.relative_to(ROOT)
        raise UserError(f"{name} is no record of DVC's that can be read.") from error
    return Record(file, md5) if md5 else None  # versions kept by a cloud have no such hash


def _complain(message: str, strict: bool) -> None:
    if strict:
        raise UserError(f"{message} (data.strict=true)")
    log.warning("Data: %s", message)
