// See shims.h.
#include "tensor/shims.h"

#include <dlfcn.h>

namespace fastamp {
namespace {

namespace py = pybind11;

/// Looks a function up in a library that the process has loaded.
template <typename Function>
bool find(const char* library, const char* name, Function& function) {
  void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (loaded == nullptr) return false;
  function = reinterpret_cast<Function>(dlsym(loaded, name));
  dlclose(loaded);
  return function != nullptr;
}

/// Compares what the shims tell about a tensor with what Python does.
bool tells_the_truth(const Shims& shims, const py::object& tensor) {
  const void* impl = Shims::impl_of(tensor.ptr());
  if (reinterpret_cast<std::uintptr_t>(impl) != tensor.attr("_cdata").cast<std::uintptr_t>())
    return false;
  void* data = nullptr;
  return shims.data_ptr(Shims::handle_of(tensor.ptr()), &data) == 0 &&
         reinterpret_cast<std::uintptr_t>(data) ==
             tensor.attr("data_ptr")().cast<std::uintptr_t>() &&
         shims.requires_grad(impl) == tensor.attr("requires_grad").cast<bool>();
}

}  // namespace

Shims find_shims(const py::module_& torch) {
  constexpr const char* kTorch = "libtorch_cpu.so";
  Shims shims;
  const bool found =
      find(kTorch, "aoti_torch_get_data_ptr", shims.data_ptr) &&
      find(kTorch, "aoti_torch_get_dim", shims.dim) &&
      find(kTorch, "aoti_torch_get_sizes", shims.sizes) &&
      find(kTorch, "aoti_torch_get_strides", shims.strides) &&
      find(kTorch, "aoti_torch_get_dtype", shims.dtype) &&
      find(kTorch, "aoti_torch_get_layout", shims.layout) &&
      find(kTorch, "aoti_torch_get_device_type", shims.device_type) &&
      find("libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv", shims.requires_grad);
  if (!found) return {};
  const py::object tensor = torch.attr("empty")(1, py::arg("device") = "cpu");
  const py::object leaf = tensor.attr("detach")().attr("requires_grad_")();
  return tells_the_truth(shims, tensor) && tells_the_truth(shims, leaf) ? shims : Shims{};
}

}  // namespace fastamp
