// What each feature adds to the extension module, in its bind.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace fastamp {

void define_step(pybind11::module_& module);
void define_data(pybind11::module_& module);
void define_timer(pybind11::module_& module);

}  // namespace fastamp
