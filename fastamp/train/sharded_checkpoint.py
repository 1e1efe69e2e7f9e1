"""A checkpoint of several ranks: a folder that all of them write and read.

Each rank writes its part of model and optimizer with `torch.distributed.checkpoint`; any number of
ranks can read them.
"""

import copy
import errno
import pickle
import zlib
from enum import EnumMeta
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from fastamp._files import sync
from fastamp.step.adamw import AdamW, zeros_beside
from fastamp.step.shards import is_spread
from fastamp.train.ranks import Ranks
from fastamp.train.state_file import (
    RUN,
    Check,
    CheckpointError,
    DamagedError,
    is_ours,
    read_file,
    write_file,
)

_CHUNK_NBYTES = 1 << 22
_INDEX = ".metadata"  # where each tensor lies, as torch writes it
_DCP = "torch.distributed.checkpoint."
# What an index may name, beside dtypes: nothing that runs code. Values that are no tensors, which
# torch would unpickle too, are not allowed: ours are in RUN.
_NAMES = {
    _DCP + "metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    _DCP + "filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}


def write_folder(path: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """Write a state, and the folder, which all ranks can reach, with all that is in it to the disk.

    The first rank may rename the folder then, once it has synced the names in it.
    """
    named, kept = state["model"], _kept(state)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # rank 0 writes the buffers
    writer = FileSystemWriter(path, sync_files=False)  # torch up to 2.13 syncs before it flushes
    try:
        save(_tensors(named, kept), storage_writer=writer, planner=planner)
    except CheckpointException as error:  # raised on all ranks
        raise next(iter(error.failures.values()))[0] from error
    sums = ranks.together(lambda: _sync_files(path, ranks.rank))
    files = {name: value for sums in ranks.gather(sums) for name, value in sums.items()}
    rest = {"model": copy.copy(named)}  # with the versions of its modules
    rest["model"].update(_on_meta(named))
    if "optimizer" in state:
        rest["optimizer"] = state["optimizer"] | {"state": _on_meta(kept)}

    def write_rest() -> None:
        for name in files:
            if not (path / name).is_file():
                msg = f"the first rank does not see {name} of another one: all need one folder"
                raise OSError(errno.EIO, msg)
        write_file(path / RUN, state | rest | {"files": files})

    ranks.first(write_rest)


def read_folder(path: Path, check: Check, ranks: Ranks) -> dict[str, Any]:
    """Return the state in a folder, with tensors on "meta"; each rank checks some of the files.

    Raises:
        CheckpointError, DamagedError: as `read_file`, on this rank.
    """
    if path.is_file():
        msg = f"{path}: was written by a single process, not by ranks"
        raise (CheckpointError if is_ours(path) else DamagedError)(msg)
    state = read_file(path / RUN, check)
    files = state["files"]
    names = sorted(files) if isinstance(files, dict) and all(map(_is_name, files)) else []
    if _INDEX not in names:
        msg = f"{path}: its ['files'] is {short(files)}, expected sums of files by name"
        raise CheckpointError(msg)
    for name in names[ranks.rank :: ranks.count]:
        if not (path / name).is_file() or _checksum(path / name) != files[name]:
            msg = f"{path}: is damaged in {name}"
            raise DamagedError(msg)
        if name == _INDEX:
            _check_index(path / name)
    return state


def load_tensors(
    path: Path, state: dict[str, Any], model: nn.Module, optimizer: Optimizer | None
) -> None:
    """Put this rank's shards into the states of model and optimizer, for tensors on "meta"."""
    named, kept = model.state_dict(), _kept(state)
    groups = optimizer.param_groups if optimizer is not None else ()
    parameters = [p for group in groups for p in group["params"]]
    for index, entries in kept.items():

        def allocate(like: Tensor, parameter: Tensor = parameters[index]) -> Tensor:
            """Return memory, sharded as the parameter is, for a tensor on "meta"."""
            if like.shape == parameter.shape:  # and in its order of memory
                return torch.empty_like(parameter, dtype=like.dtype, requires_grad=False)
            if isinstance(optimizer, AdamW) and is_spread(parameter) and like.dim():
                return zeros_beside(parameter, tuple(like.shape), like.dtype)
            return torch.empty(like.shape, dtype=like.dtype)

        kept[index] = tree_map_only(Tensor, allocate, entries)
    try:
        load(_tensors(named, kept), checkpoint_id=path)
    except CheckpointException as error:  # raised on all ranks
        raise next(iter(error.failures.values()))[0] from error
    state["model"].update((n, v) for n, v in named.items() if isinstance(v, Tensor))


class _Index(pickle.Unpickler):
    """Reads an index, with the names above only; torch's would run whatever an index names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function that the index names, if it is an allowed one."""
        if (module, name) == ("builtins", "getattr"):  # for enumerations, before Python 3.11.4
            return _member_of
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_path = module.startswith("pathlib") and name in {"PosixPath", "WindowsPath"}
        if is_dtype or is_path or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        msg = f"names {module}.{name}, which is no part of an index of tensors"
        raise pickle.UnpicklingError(msg)


def _member_of(kind: Any, name: str) -> Any:
    if not isinstance(kind, EnumMeta):
        msg = f"names an attribute of {short(kind)}"
        raise pickle.UnpicklingError(msg)
    return kind[name]


def _check_index(path: Path) -> None:
    """Refuse an index with which torch would run code."""
    try:
        with path.open("rb") as file:
            _Index(file).load()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # unpickling a foreign file can raise anything
        msg = f"{path}: {error}"
        raise DamagedError(msg) from error


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _kept(state: dict[str, Any]) -> dict[Any, Any]:
    """Return what the optimizer keeps for each parameter, if there is one."""
    return state["optimizer"]["state"] if "optimizer" in state else {}


def _tensors(named: dict[str, Any], kept: dict[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model's and an optimizer's state by their paths."""
    leaves, _ = tree_flatten_with_path({"model": named, "optimizer": kept})
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _on_meta(tree: Any) -> Any:
    """Return a tree whose tensors keep their shape and dtype only."""
    return tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), tree)


def _sync_files(folder: Path, rank: int) -> dict[str, int]:
    """Sync the files that a rank has written to the disk, and return their checksums."""
    mine = [*folder.glob(f"__{rank}_*"), *([folder / _INDEX] if rank == 0 else [])]
    for path in mine:
        sync(path)
    return {path.name: _checksum(path) for path in mine}


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            value = zlib.crc32(chunk, value)
    return value
