"""Classes whose base class comes from the package of Lightning that is in use.

`lightning.pytorch` and `pytorch_lightning` have the same names and unrelated classes.
"""

import sys
from functools import cache, partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from typing_extensions import Self

from fastamp.metrics.sinks import require

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class OfLightning:
    """A class whose base class in Lightning is found when an instance is made."""

    base: str
    """The path of the base class in the package."""
    key: str | None = None
    """Its name in checkpoints, if that is not its own."""

    def __new__(cls, *_args: Any, package: str | tuple[str, ...] | None = None, **_kw: Any) -> Self:
        """Make an instance of a subclass that has Lightning's base class too."""
        names = packages_in_use() if package is None else package
        made: type[Self] = _made(cls, (names,) if isinstance(names, str) else names)  # type: ignore[arg-type]
        return super().__new__(made)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy the instance; unpickling makes the class again."""
        reduced: Any = super().__reduce_ex__(protocol)
        cls, names = type(self).made_of  # type: ignore[attr-defined]
        return (partial(OfLightning.__new__, cls, package=names), (), *reduced[2:])


def packages_in_use() -> tuple[str, ...]:
    """Return the packages that are imported, or else the first that is installed."""
    imported = tuple(name for name in PACKAGES if name in sys.modules)
    installed = (name for name in PACKAGES if find_spec(name.partition(".")[0]))
    return imported or (next(installed, PACKAGES[0]),)


@cache
def _made(cls: Any, names: tuple[str, ...]) -> Any:
    """Return a subclass of `cls` and of Lightning's class; of both packages' for a callback."""
    if not set(names) <= set(PACKAGES):
        msg = f"package: expected one of {', '.join(PACKAGES)}, got {', '.join(names)}"
        raise ValueError(msg)
    if len(names) > 1 and cls.base != "Callback":
        msg = f"package: expected the name of one, {' and '.join(names)} are both imported"
        raise ValueError(msg)
    bases = [attrgetter(cls.base)(require(name, "lightning")) for name in names]
    made = type(cls.__name__, (cls, *bases), {"__module__": cls.__module__})
    made.made_of = (cls, names)  # type: ignore[attr-defined]
    made.__qualname__ = cls.key or made.__qualname__
    return made
