"""Loading of compiled modules: what they were compiled for, and why one does not load.

``commhooks._C`` is loaded in the same way; see :mod:`commhooks.extensions`.

Note [Without extensions]
~~~~~~~~~~~~~~~~~~~~~~~~~
An installation may have no compiled modules, or the user may ask for none with
``COMMHOOKS_NO_EXTENSION=1``. Then reducer/native.py and commhooks/native.py, from which everything
else imports, have what fallback modules in Python offer under the same names. There is no reducer
in Python: hooks run on torch's wrapper. A compiled module that is there has to load: it is never
replaced because it is broken.
"""

import importlib
import json
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch  # loads the libraries that the compiled modules link to

from reducer.errors import CommHookError

REMEDY = (
    "compile commhooks for this Python and torch: `pip install --no-build-isolation "
    "--force-reinstall --no-deps .` in its source folder, or `make build`"
)
_SWITCH = "COMMHOOKS_NO_EXTENSION"


@dataclass(frozen=True)
class Extension:
    """A compiled module of this project, in the package whose files are in ``folder``."""

    name: str
    folder: Path

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled module is to be used, even if it does not load."""
        return os.environ.get(_SWITCH) != "1" and any(self.folder.glob("_C*.so"))

    def load(self) -> None:
        """Import the module if it is compiled.

        Raises ImportError with its ``name``, the reason in the message and the remedy as a note.
        """
        if not self.is_compiled:
            return
        try:
            importlib.import_module(self.name)
        except ImportError as error:
            explanation = ImportError(self._reason(error), name=self.name, path=error.path)
            explanation.add_note(REMEDY)
            raise explanation from error

    def require(self, what: str) -> None:
        """Raise CommHookError, which says what to do, if ``what`` needs the compiled module."""
        if not self.is_compiled:
            raise CommHookError(
                f"{what} needs the extension {self.name}: {self.absence}. Either wrap the model in "
                "torch.nn.parallel.DistributedDataParallel, on which commhooks.register() works "
                f"with every hook, or {REMEDY}"
            )

    @property
    def absence(self) -> str:
        """Why the module is not used, if :attr:`is_compiled` is false."""
        if os.environ.get(_SWITCH) == "1":
            return f"{_SWITCH}=1 in the environment leaves it out"
        return f"it is not compiled, as {self.folder} has no _C*.so"

    def built_with(self) -> dict[str, str | None]:
        """Return the versions of "torch" and "cuda" (None: without) that it was compiled for.

        They are in a file that setup.py writes; the result is empty if there is none.
        """
        path = self.folder / "built_with.json"
        if not path.exists():
            return {}
        versions: dict[str, str | None] = json.loads(path.read_text())
        return versions

    def _reason(self, error: ImportError) -> str:
        expected = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        if not (self.folder / expected).exists():
            others = ", ".join(sorted(path.name for path in self.folder.glob("_C*.so")))
            return (
                f"{self.name} is not compiled for this Python: {self.folder} has no {expected}, "
                f"but {others}"
            )
        text = f"{self.name} does not load: {error}"
        torch_then = self.built_with().get("torch")
        if torch_then not in (None, torch.__version__):
            text += f"; it was compiled against torch {torch_then}, and this is {torch.__version__}"
        return text


ENGINE = Extension("reducer._C", Path(__file__).parent)


def unavailable(error: ImportError) -> Callable[[str], NoReturn]:
    """Return a ``__getattr__`` for a package whose extension does not load; it raises ``error``."""

    def raise_error(name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by Python itself
            raise AttributeError(name)
        again = ImportError(str(error), name=error.name, path=error.path)
        for note in getattr(error, "__notes__", ()):
            again.add_note(note)
        raise again

    return raise_error
