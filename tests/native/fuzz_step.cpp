// Gradients read and rescaled.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "input.h"
#include "step/convert.h"
#include "step/math.h"
#include "step/ops.h"

namespace fuzz {

using fastamp::Format;

namespace {

float element(const fastamp::TensorView& view, int64_t i) {
  const auto* at = static_cast<const char*>(view.data) + i * fastamp::size_of(view.format);
  std::uint32_t bits = 0;
  std::memcpy(&bits, at, as_size(fastamp::size_of(view.format)));
  const auto half = static_cast<std::uint16_t>(bits);
  switch (view.format) {
    case Format::kBFloat16:
      return fastamp::to_float(fastamp::BFloat16{half});
    case Format::kFloat16:
      return fastamp::to_float(fastamp::Float16{half});
    default:
      break;
  }
  return fastamp::float_of(bits);
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

void fuzz_step(Input& input) {
  fastamp::TensorList tensors;
  std::vector<Bytes> memory;
  int64_t chunks = 0;
  const bool is_tame = input.take<std::uint8_t>() % 2 == 0;
  for (int64_t n = input.number(20); n > 0; --n) {
    const auto format = static_cast<Format>(input.take<std::uint8_t>() % 3);
    const int64_t numel = 1 + input.number(70000 * (tensors.size() < 2 ? 2 : 0));
    const int64_t nbytes = numel * fastamp::size_of(format);
    memory.push_back(allocate(nbytes));
    input.fill(memory.back(), nbytes);
    if (is_tame)  // a positive exponent of 63 and below is finite in all three formats
      for (int64_t i = fastamp::size_of(format) - 1; i < nbytes; i += fastamp::size_of(format))
        memory.back()[as_size(i)] &= 0x3f;
    tensors.push_back({memory.back().get(), numel, format});
    chunks += fastamp::chunks_of(numel);
  }
  const float scale = input.take<float>();
  const float found_before = 1;
  float skipped = 0;
  const fastamp::ClipSpec clip{input.take<std::uint8_t>() % 2 == 0 ? &scale : nullptr,
                               input.take<std::uint8_t>() % 2 == 0,
                               input.take<std::uint8_t>() % 2 == 0,
                               input.take<float>(),
                               input.take<std::uint8_t>() % 2 == 0 ? &found_before : nullptr,
                               input.take<std::uint8_t>() % 2 == 0 ? &skipped : nullptr};
  const std::unique_ptr<double[]> work(new double[as_size(1 + chunks)]);
  fastamp::GradStats stats{};
  const fastamp::Launch launch{1 + input.take<std::uint8_t>() % 3, 0, nullptr};
  fastamp::cpu_ops().grad_stats(tensors, clip, work.get(), &stats, nullptr, launch);
  double expected = 0;
  bool is_finite = true;
  for (const auto& view : tensors)
    for (int64_t i = 0; i < view.numel; ++i) {
      const double x = std::fabs(static_cast<double>(element(view, i)));
      is_finite &= std::isfinite(x);
      expected += x * x;
    }
  require(is_finite == std::isfinite(work[0]), "whether all gradients are finite");
  // Any order of adding at most 300,000 positive float64 numbers.
  if (is_finite) require(std::fabs(work[0] - expected) <= 1e-10 * expected, "the reduction");
  const bool is_skipped = !is_finite || clip.before != nullptr;
  require(stats.found_inf == (is_skipped ? 1.0F : 0.0F), "found_inf");
  require(skipped == (clip.skipped == nullptr ? 0.0F : stats.found_inf), "the skipped steps");
  const float factor = input.take<std::uint8_t>() % 4 == 0 ? 1.0F : input.take<float>();
  std::vector<float> before;
  for (const auto& view : tensors)
    for (int64_t i = 0; i < view.numel; ++i) before.push_back(element(view, i));
  fastamp::cpu_ops().rescale(tensors, &factor, launch);
  std::size_t at = 0;
  for (const auto& view : tensors)
    for (int64_t i = 0; i < view.numel; ++i, ++at) {
      const float product = factor == 1.0F ? before[at] : before[at] * factor;
      const bool is_exact = view.format == Format::kFloat32 || factor == 1.0F;
      if (is_exact) require(same(element(view, i), product), "a rescaled gradient");
    }
}

}  // namespace fuzz
