// Fills views of tensors from the exchange table that their type carries.
#include "tensor/tensors.h"

#include <algorithm>
#include <string>
#include <vector>

#include "support/macros.h"

namespace fastamp {
namespace {

using dlpack::DataType;

constexpr DataType kFloat16{dlpack::kFloat, 16, 1};
constexpr DataType kBFloat16{dlpack::kBfloat, 16, 1};

// Linux maps nothing below. torch's zero tensors have no memory: their rows "lie" at the offset.
constexpr std::uintptr_t kLowestAddress = 64 * 1024;

/// What is known about torch, looked up once at import. The references live as long as the process.
struct Torch {
  PyTypeObject* tensor = nullptr;  // these two types only: a subclass may lie about its memory
  PyTypeObject* parameter = nullptr;
  const PyGetSetDef* requires_grad = nullptr;
  const PyGetSetDef* grad = nullptr;
  PyObject* is_neg = nullptr;  // methods of torch.Tensor
  PyObject* is_conj = nullptr;
  PyObject* empty = nullptr;  // torch.empty, and the names of its arguments after the size
  PyObject* empty_names = nullptr;
  PyObject* float32 = nullptr;
  PyObject* float64 = nullptr;
  PyObject* increment_version = nullptr;
  PyObject* get_num_threads = nullptr;
  const dlpack::ExchangeApi* api = nullptr;
};

Torch torch;

bool calls(PyObject* method, PyObject* self) {
  const auto answer = py::reinterpret_steal<py::object>(PyObject_CallOneArg(method, self));
  if (!answer) PyErr_Clear();
  return !answer.is(py::handle(Py_False));
}

/// Reads a plain tensor that has an address: sparse ones, those on meta, torch's zero tensors and
/// the like have none.
FASTAMP_INLINE bool read(py::handle object, dlpack::Tensor& found) {
  const PyTypeObject* type = Py_TYPE(object.ptr());
  if ((type != torch.tensor && type != torch.parameter) || torch.api == nullptr) return false;
  if (torch.api->tensor_from_py_object(object.ptr(), &found) != 0) {
    PyErr_Clear();
    return false;
  }
  found.data = static_cast<char*>(found.data) + found.byte_offset;
  return reinterpret_cast<std::uintptr_t>(found.data) >= kLowestAddress || found.numel() == 0;
}

bool is_contiguous(const dlpack::Tensor& tensor, int first = 0) {
  std::int64_t expected = 1;
  int dim = tensor.ndim - 1;
  for (; dim >= first && (tensor.shape[dim] == 1 || tensor.strides[dim] == expected); --dim)
    expected *= tensor.shape[dim];
  return dim < first || tensor.numel() == 0;
}

/// Whether the elements fill their memory without gaps or overlap, in any order of dimensions.
bool is_dense(const dlpack::Tensor& tensor) {
  if (is_contiguous(tensor)) return true;
  std::vector<int> order(static_cast<std::size_t>(tensor.ndim));
  for (int i = 0; i < tensor.ndim; ++i) order[static_cast<std::size_t>(i)] = i;
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return tensor.strides[a] < tensor.strides[b]; });
  std::int64_t expected = 1;
  for (const int i : order) {
    if (tensor.shape[i] == 1) continue;
    if (tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

/// Pinned memory is the host's.
bool is_on(dlpack::Device found, dlpack::Device wanted) {
  if (wanted.type == dlpack::kCpu)
    return found.type == dlpack::kCpu || found.type == dlpack::kCudaHost;
  return found.type == wanted.type && found.index == wanted.index;
}

bool requires_grad(PyObject* tensor) {
  PyObject* answer = torch.requires_grad->get(tensor, torch.requires_grad->closure);
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);  // True and False outlive it
  return answer != Py_False;
}

/// Whether a tensor requires grad, or is a negated or conjugated view; integers never are.
bool has_flags(PyObject* tensor, const dlpack::Tensor& found) {
  const std::uint8_t code = found.dtype.code;
  if (code == dlpack::kInt || code == dlpack::kUInt || code == dlpack::kBool) return false;
  return requires_grad(tensor) || is_negated(tensor, found.numel()) ||
         (code == dlpack::kComplex &&
          (calls(torch.is_conj, tensor) || calls(torch.is_neg, tensor)));
}

/// Returns the functions of a property: a call through its descriptor takes three times as long.
const PyGetSetDef* getter(const py::object& type, const char* name) {
  PyObject* property = py::object(type.attr(name)).release().ptr();
  if (Py_TYPE(property) != &PyGetSetDescr_Type) return nullptr;
  return reinterpret_cast<PyGetSetDescrObject*>(property)->d_getset;
}

}  // namespace

bool attach_torch() {
  const auto keep = [](py::object object) { return object.release().ptr(); };
  const py::module_ module = py::module_::import("torch");
  const py::object tensor = module.attr("Tensor");
  torch.tensor = reinterpret_cast<PyTypeObject*>(keep(tensor));
  torch.parameter = reinterpret_cast<PyTypeObject*>(keep(module.attr("nn").attr("Parameter")));
  torch.requires_grad = getter(tensor, "requires_grad");
  torch.grad = getter(tensor, "grad");
  if (torch.requires_grad == nullptr || torch.grad == nullptr) return false;
  torch.is_neg = keep(tensor.attr("is_neg"));
  torch.is_conj = keep(tensor.attr("is_conj"));
  torch.empty = keep(module.attr("empty"));
  torch.empty_names = keep(py::make_tuple("dtype", "device"));
  torch.float32 = keep(module.attr("float32"));
  torch.float64 = keep(module.attr("float64"));
  torch.increment_version = keep(module.attr("autograd").attr("graph").attr("increment_version"));
  torch.get_num_threads = keep(module.attr("get_num_threads"));
  const py::object capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
  if (capsule.is_none()) return false;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api == nullptr) throw py::error_already_set();
  if (api->version.major != dlpack::kMajorVersion || api->tensor_from_py_object == nullptr)
    return false;
  torch.api = api;
  return true;
}

bool read_dense(py::handle object, dlpack::Device device, dlpack::Tensor& tensor) {
  return read(object, tensor) && is_on(tensor.device, device) && is_dense(tensor);
}

std::optional<Format> format_of(DataType dtype) {
  if (dtype == kFloat32) return Format::kFloat32;
  if (dtype == kBFloat16) return Format::kBFloat16;
  if (dtype == kFloat16) return Format::kFloat16;
  return std::nullopt;
}

bool is_alike(const dlpack::Tensor& one, const dlpack::Tensor& other, std::int64_t times) {
  if (one.ndim != other.ndim) return false;
  for (int dim = 0; dim < one.ndim; ++dim)
    if (one.shape[dim] != other.shape[dim] ||
        (one.shape[dim] > 1 && one.strides[dim] != times * other.strides[dim]))
      return false;
  return true;
}

bool is_negated(py::handle tensor, std::int64_t numel) {
  return numel <= 1 && calls(torch.is_neg, tensor.ptr());
}

py::object grad_of(py::handle tensor) {
  const PyTypeObject* type = Py_TYPE(tensor.ptr());
  if (type != torch.tensor && type != torch.parameter) return {};
  auto grad = py::reinterpret_steal<py::object>(torch.grad->get(tensor.ptr(), torch.grad->closure));
  if (!grad) throw py::error_already_set();
  return grad;
}

void drop_grad(py::handle tensor) {
  if (torch.grad->set(tensor.ptr(), Py_None, torch.grad->closure) != 0)
    throw py::error_already_set();
}

bool read_host_tensor(py::handle object, dlpack::Tensor& tensor) {
  return read(object, tensor) && is_on(tensor.device, kHost) && is_contiguous(tensor) &&
         !has_flags(object.ptr(), tensor);
}

bool read_rows(py::handle object, dlpack::Tensor& tensor) {
  return read(object, tensor) && is_on(tensor.device, kHost) && tensor.ndim > 0 &&
         is_contiguous(tensor, 1);
}

void* data_of(py::handle tensor, DataType dtype, std::int64_t numel, dlpack::Device device,
              const char* argument) {
  dlpack::Tensor found;
  if (!read_dense(tensor, device, found) || !(found.dtype == dtype) || found.numel() < numel)
    throw py::type_error(std::string(argument) + ": expected a dense float" +
                         std::to_string(dtype.bits) + " tensor of at least " +
                         std::to_string(numel) + " elements on the gradients' device");
  return found.data;
}

py::object new_tensor(std::int64_t numel, DataType dtype, py::handle device) {
  const py::int_ size(numel);
  PyObject* const args[] = {size.ptr(), dtype == kFloat64 ? torch.float64 : torch.float32,
                            device.ptr()};
  auto made = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(torch.empty, args, 1, torch.empty_names));
  if (!made) throw py::error_already_set();
  return made;
}

void increment_versions(py::handle tensors) {
  const py::handle function = torch.increment_version;
  function(tensors);
}

int num_threads() { return py::handle(torch.get_num_threads)().cast<int>(); }

void* current_stream(int device_index) {
  void* stream = nullptr;
  if (torch.api->current_work_stream(dlpack::kCuda, device_index, &stream) != 0)
    throw py::error_already_set();
  return stream;
}

}  // namespace fastamp
