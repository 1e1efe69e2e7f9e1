"""The op table: what every backend does with tensors, and which one serves which tensor."""

from fastamp._ops.captures import apart_from_captures
from fastamp._ops.choose import FALLBACK, backends, host_ops, is_chosen, ops_for, use_only
from fastamp._ops.graph import outside_graphs, untraced
from fastamp._ops.held import Held, Tensors, hold, index_in_whole, parts_of
from fastamp._ops.host_types import (
    AugmentStep,
    Column,
    HostOps,
    Images,
    StepKind,
    Windows,
    check_rows,
    index_error,
)
from fastamp._ops.painting import SPLITMIX, mix
from fastamp._ops.types import (
    NO_STATE,
    OTHER_TYPE,
    Apply,
    Clip,
    GradStats,
    Ops,
    Packed,
    Region,
    RegionMaker,
    Rule,
    Update,
    clones_what_is_written,
    is_dense,
    is_laid_out_like,
    local_of,
    moved,
)
