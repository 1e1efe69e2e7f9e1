// The ops of the step, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace fastamp {

void define_amp(pybind11::module_& module);

}  // namespace fastamp
