"""Checkpoints of several ranks: a folder each, written and read by all of them."""

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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from fastamp.train.checkpoint import Checkpoints
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
_NONE: dict[str, Any] = {"state": {}, "param_groups": []}  # where there is no optimizer


class ShardedCheckpoints(Checkpoints):
    """The checkpoints of one run, `step-00000123` and the like: folders that all ranks can reach.

    Each rank writes its part of model and optimizer with `torch.distributed.checkpoint`; any number
    of ranks can read them.
    """

    suffix = ""

    def _restore(
        self, state: dict[str, Any], model: nn.Module, optimizer: Optimizer | None
    ) -> None:
        named, kept = model.state_dict(), state.get("optimizer", _NONE)
        groups = optimizer.param_groups if optimizer is not None else ()
        parameters = [p for group in groups for p in group["params"]]
        for index, entries in kept["state"].items():

            def allocate(like: Tensor, parameter: Tensor = parameters[index]) -> Tensor:
                """Return memory, sharded as the parameter is, for a tensor on "meta"."""
                is_whole = like.shape == parameter.shape
                source = parameter if is_whole else like.new_empty((), device="cpu")
                return source.new_empty(like.shape, dtype=like.dtype)

            kept["state"][index] = tree_map_only(Tensor, allocate, entries)
        try:
            load(_tensors(named, kept), checkpoint_id=self._mine[-1])
        except CheckpointException as error:  # raised on all ranks
            raise next(iter(error.failures.values()))[0] from error
        if optimizer is not None:
            optimizer.load_state_dict(kept)
        others = {n: v for n, v in state["model"].items() if not isinstance(v, Tensor)}
        model.load_state_dict(named | others)

    def _write(self, part: Path, state: dict[str, Any]) -> None:
        named, kept = state["model"], state.get("optimizer", _NONE)
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # rank 0 writes the buffers
        try:
            save(_tensors(named, kept), checkpoint_id=part, planner=planner)
        except CheckpointException as error:  # raised on all ranks
            raise next(iter(error.failures.values()))[0] from error
        sums = self._ranks.together(lambda: _sum_files(part, self._ranks.rank))
        files = {name: value for sums in self._ranks.gather(sums) for name, value in sums.items()}
        rest = {"model": _on_meta(named)}
        if kept is not _NONE:
            rest["optimizer"] = kept | {"state": _on_meta(kept["state"])}
        self._ranks.first(lambda: write_file(part / RUN, state | rest | {"files": files}))

    def _read_own(self, path: Path, check: Check) -> dict[str, Any]:
        """Return the state in a checkpoint, and check this rank's share of its files."""
        if path.is_file():
            msg = f"{path}: was written by a single process, not by ranks"
            raise (CheckpointError if is_ours(path) else DamagedError)(msg)
        state = read_file(path / RUN, check)
        files = state["files"]
        names = sorted(files) if isinstance(files, dict) and all(map(_is_name, files)) else []
        if _INDEX not in names:
            msg = f"{path}: its ['files'] is {short(files)}, expected sums of files by name"
            raise CheckpointError(msg)
        for name in names[self._ranks.rank :: self._ranks.count]:
            if not (path / name).is_file() or _checksum(path / name) != files[name]:
                msg = f"{path}: is damaged in {name}"
                raise DamagedError(msg)
            if name == _INDEX:
                _check_index(path / name)
        return state


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


def _tensors(named: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model's and an optimizer's state by their paths."""
    leaves, _ = tree_flatten_with_path({"model": named, "optimizer": optimizer["state"]})
    return {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _on_meta(tree: Any) -> Any:
    """Return a tree whose tensors keep their shape and dtype only."""
    return tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), tree)


def _sum_files(folder: Path, rank: int) -> dict[str, int]:
    """Return the checksums of the files that a rank has written."""
    mine = [*folder.glob(f"__{rank}_*"), *([folder / _INDEX] if rank == 0 else [])]
    return {path.name: _checksum(path) for path in mine}


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            value = zlib.crc32(chunk, value)
    return value
