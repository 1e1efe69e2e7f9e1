"""The op table: what every backend does with tensors, and which one serves which tensor."""

from fastamp._ops.choose import FALLBACK, backends, host_ops, ops_for, use_only
from fastamp._ops.graph import outside_graphs
from fastamp._ops.held import Held, Tensors, hold, index_in_whole, parts_of
from fastamp._ops.painting import augment_image
from fastamp._ops.types import (
    NO_STATE,
    OTHER_TYPE,
    AugmentStep,
    Clip,
    Column,
    Gatherer,
    GradStats,
    HostOps,
    Images,
    Ops,
    Packed,
    Region,
    RegionMaker,
    Rule,
    StepKind,
    Update,
    index_error,
    local_of,
)

__all__ = [
    "FALLBACK",
    "NO_STATE",
    "OTHER_TYPE",
    "AugmentStep",
    "Clip",
    "Column",
    "Gatherer",
    "GradStats",
    "Held",
    "HostOps",
    "Images",
    "Ops",
    "Packed",
    "Region",
    "RegionMaker",
    "Rule",
    "StepKind",
    "Tensors",
    "Update",
    "augment_image",
    "backends",
    "hold",
    "host_ops",
    "index_error",
    "index_in_whole",
    "local_of",
    "ops_for",
    "outside_graphs",
    "parts_of",
    "use_only",
]
