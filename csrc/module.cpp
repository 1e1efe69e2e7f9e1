// The extension module fastamp._native: one function per feature.
#include <pybind11/pybind11.h>

#include "module.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The compiled core of fastamp. Private: use the fastamp package.";
  fastamp::define_tensors(module);
  fastamp::define_step(module);
  fastamp::define_collate(module);
  fastamp::define_gather(module);
  fastamp::define_timer(module);
}
