"""What a loss of power leaves of a folder: what was synced, and any part of the rest.

A file keeps what it held when it was last synced; later writes are there, or in part, or not. What
a program still had in a buffer then, as Python's files have until `flush`, counts as written later.
A folder keeps the names that it had when it was last synced, and some of the changes after that,
in their order.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random


class _File:
    def __init__(self, synced: bytes = b"") -> None:
        self.synced = synced


class _Folder:
    """A folder as programs see it, and as the disk has it."""

    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}
        self.pending: list[dict[str, _File | _Folder | None]] = []

    def change(self, names: dict[str, _File | _Folder | None]) -> None:
        """Give names to files, or None to remove them; all of it happens or nothing."""
        self.pending.append(names)
        self.entries = _changed(self.entries, names)

    def sync(self) -> None:
        """Write to the disk what programs see."""
        self.durable, self.pending = dict(self.entries), []


def _changed(entries, names):
    return {name: node for name, node in {**entries, **names}.items() if node is not None}


def read(folder: Path) -> _Folder:
    """Read a folder, all of which is on the disk."""
    root = _Folder()
    for path in folder.iterdir():
        root.entries[path.name] = read(path) if path.is_dir() else _File(path.read_bytes())
    root.sync()
    return root


def lose(
    folder: Path, before: _Folder, journal: Path, rng: random.Random, *, contents: bool
) -> None:
    """Turn a folder into what a loss of power at the end of a journal leaves of it.

    With `contents` all names are there, as file systems with a journal of names only leave them,
    and of each file what was synced and nothing else.
    """
    for line in journal.read_text().splitlines():
        call, *paths = line.split("\t")
        if call != "struck":
            _apply(before, folder, call, *paths)
    live: dict[_File, bytes] = {}
    _read_live(before, folder, live)
    shutil.rmtree(folder)
    _write(before, folder, {} if contents else live, None if contents else rng)


def _apply(root: _Folder, at: Path, call: str, path: str, other: str = "") -> None:
    if call == "syncdir":
        folder = _find(root, at, Path(path) / "x")[0]
        folder.sync()
        return
    folder, name = _find(root, at, Path(path))
    if call == "create":
        folder.change({name: _File()})
    elif call == "mkdir":
        folder.change({name: _Folder()})
    elif call == "remove":
        folder.change({name: None})
    elif call == "sync":
        node = folder.entries.get(name)
        if isinstance(node, _File):  # else its name is gone
            node.synced = Path(other).read_bytes()
    elif call == "rename":
        target, new = _find(root, at, Path(other))
        node = folder.entries[name]
        if target is folder:
            folder.change({name: None, new: node})
        else:
            target.change({new: node})
            folder.change({name: None})


def _find(root: _Folder, at: Path, path: Path) -> tuple[_Folder, str]:
    """Return the folder that holds a path, and its name there."""
    folder = root
    for part in path.relative_to(at).parts[:-1]:
        folder = folder.entries[part]
    return folder, path.name


def _read_live(folder: _Folder, at: Path, live: dict[_File, bytes]) -> None:
    for name, node in folder.entries.items():
        if isinstance(node, _Folder):
            _read_live(node, at / name, live)
        else:
            live[node] = (at / name).read_bytes()


def _write(folder: _Folder, at: Path, live: dict[_File, bytes], rng: random.Random | None) -> None:
    at.mkdir()
    entries = folder.entries if rng is None else folder.durable
    for names in [] if rng is None else folder.pending[: rng.randint(0, len(folder.pending))]:
        entries = _changed(entries, names)
    for name, node in entries.items():
        if isinstance(node, _Folder):
            _write(node, at / name, live, rng)
            continue
        if rng is None:
            (at / name).write_bytes(node.synced)
            continue
        seen = live.get(node, node.synced)
        versions = [node.synced, seen]
        if seen.startswith(node.synced):
            versions.append(seen[: rng.randint(len(node.synced), len(seen))])
        (at / name).write_bytes(rng.choice(versions))
