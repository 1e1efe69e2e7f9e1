"""Lightning's package: `lightning.pytorch`, or `pytorch_lightning`, its older name.

Both have the same names and unrelated classes, so a process works with one of them.
"""

import sys
from importlib.util import find_spec
from typing import Any

from fastamp.metrics.sinks import require

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _import_lightning() -> Any:
    """Import the package that the program imported first, else the one that is installed."""
    imported = [name for name in list(sys.modules) if name in PACKAGES]
    installed = [name for name in PACKAGES if find_spec(name.partition(".")[0])]
    return require([*imported, *installed, *PACKAGES][0], "lightning")


pl = _import_lightning()
