"""What is left of the package where the engine does not load: whoever asks for it is told why."""

from collections.abc import Callable
from typing import NoReturn

__all__ = ["refusal"]


def refusal(error: ImportError) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__`` that raises ImportError, with the reason and what to do."""

    def refuse(name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by Python itself
            raise AttributeError(name)
        again = ImportError(str(error), name=error.name, path=error.path)
        for note in getattr(error, "__notes__", ()):
            again.add_note(note)
        raise again

    return refuse
