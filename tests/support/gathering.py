"""What a loader makes of columns: the rows by torch.index_select, one step after the other."""

from __future__ import annotations

import numpy as np
import torch


def gather(columns, rows, keys=None):
    """Return the batch of some rows, which count from 0; `keys` are those of their samples."""
    assert not isinstance(columns, str), columns
    rows = torch.as_tensor(rows)
    keys = np.zeros(len(rows), np.uint64) if keys is None else np.array(keys, np.uint64)
    rows = rows if columns.rows is None else columns.rows[rows]
    rows = rows if columns.starts is None else columns.starts(keys)
    parts = []
    for array, dtype in zip(columns.arrays, columns.dtypes, strict=True):
        # torch selects rows of uint16, uint32 and uint64, but not single numbers
        there = rows.to(array.device)
        parts.append(torch.index_select(array[..., None], 0, there)[..., 0].to(dtype))
    parts = parts if columns.then is None else columns.then(parts, keys)
    return columns.build(parts)
