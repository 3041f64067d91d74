"""Mistakes that a user can mend, said in one line."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can mend: printed as one line, without a traceback."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean …?` for the known name closest to `name`, else an empty text."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def user_error(error: BaseException) -> BaseException | None:
    """The user's mistake that an error is, or was raised from: Hydra wraps what it instantiates.

    Lightning's MisconfigurationException is one too, known by its name: it is not imported here.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, UserError):
        if type(cause).__name__ == "MisconfigurationException":
            break
        cause = cause.__cause__
    return cause
