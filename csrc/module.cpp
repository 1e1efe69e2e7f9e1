// The extension module fastamp._native: one function per feature.
#include "module.h"

#include "tensor/tensors.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The compiled core of fastamp. Private: use the fastamp package.";
  module.attr("has_exchange_table") = fastamp::attach_torch();
  fastamp::define_step(module);
  fastamp::define_data(module);
  fastamp::define_timer(module);
}
