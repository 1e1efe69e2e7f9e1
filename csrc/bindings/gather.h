// The loader's gather queue, as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

namespace fastamp {

void define_gather(pybind11::module_& module);

}  // namespace fastamp
