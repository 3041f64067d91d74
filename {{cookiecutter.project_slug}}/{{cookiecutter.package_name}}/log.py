"""Lines that people read: on the terminal through rich, and in a file."""

import logging
import sys
import traceback
import warnings
from pathlib import Path

from rich.console import Console

log = logging.getLogger(__package__)
console = Console(soft_wrap=True)


class TerminalHandler(logging.Handler):
    """Prints log lines through rich, so that they stand above a progress bar, not in it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        console.print(self.format(record), markup=False, highlight=False)


def setup_logging(file: Path | None = None, *, terminal: bool = True) -> None:
    """Send the project's and Lightning's log lines, and warnings, to the terminal and to `file`."""
    handlers: list[logging.Handler] = []
    if terminal:
        to_terminal = TerminalHandler()
        to_terminal.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        handlers.append(to_terminal)
    if file is not None:
        to_file = logging.FileHandler(file, encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(to_file)
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    logging.captureWarnings(True)
    # Lightning's own use of torch's deprecated names: nothing that a user could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    # Resumed runs write where they wrote before.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists")
    # It takes a cluster's login node, or a job of one task, for a mistake.
    warnings.filterwarnings("ignore", "The `srun` command is available")
    log.setLevel(logging.INFO)
    for name in ("lightning", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)  # its hints and advertisements are INFO


def record_failure(file: Path, error: BaseException) -> None:
    """Append an error's traceback to a log file, so that a sweep's jobs keep their own."""
    with file.open("a", encoding="utf-8") as stream:
        traceback.print_exception(error, file=stream)
    sys.stdout.flush()
