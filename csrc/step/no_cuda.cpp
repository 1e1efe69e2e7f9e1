// The CUDA backend's symbols for a module that was built without it.
#include <stdexcept>

#include "step/ops.h"

namespace fastamp {
namespace {

template <typename... Args>
void refuse(Args...) {
  throw std::runtime_error(
      "fastamp was built without CUDA; rebuild it with nvcc on the PATH and FASTAMP_CUDA=ON");
}

}  // namespace

const OpTable& cuda_ops() {
  static constexpr OpTable table{refuse, refuse, refuse};
  return table;
}

void check_device(int) { refuse(); }

bool built_with_cuda() { return false; }

}  // namespace fastamp
