// The CUDA backend's symbols for a module that was built without it.
#include <stdexcept>

#include "step/ops.h"

namespace fastamp {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "fastamp was built without CUDA; rebuild it with nvcc on the PATH and FASTAMP_CUDA=ON");
}

void grad_stats(const TensorList&, const ClipSpec&, double*, GradStats*, const UpdateList*,
                const Launch&) {
  refuse();
}

void rescale(const TensorList&, const float*, const Launch&) { refuse(); }

void update(const UpdateList&, const UpdateSpec&, const Launch&) { refuse(); }

}  // namespace

const OpTable& cuda_ops() {
  static constexpr OpTable table{grad_stats, rescale, update};
  return table;
}

void check_device(int) { refuse(); }

bool built_with_cuda() { return false; }

}  // namespace fastamp
