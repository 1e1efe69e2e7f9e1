// The timer's recorder, as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

namespace fastamp {

void define_timer(pybind11::module_& module);

}  // namespace fastamp
