// The stack of samples into a batch, as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

namespace fastamp {

void define_collate(pybind11::module_& module);

}  // namespace fastamp
