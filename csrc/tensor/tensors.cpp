// Reads tensors through torch's DLPack exchange table (torch 2.10 and later), or attribute by
// attribute where it is absent.
#include "tensor/tensors.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "tensor/shims.h"
#include "step/math.h"

namespace fastamp {
namespace {

using dlpack::DataType;
using dlpack::ExchangeApi;

// How many tensors ahead of the one that is read their metadata are fetched.
constexpr Py_ssize_t kPrefetchTensors = 8;

constexpr DataType kFloat32{dlpack::kFloat, 32, 1};
constexpr DataType kFloat16{dlpack::kFloat, 16, 1};
constexpr DataType kBFloat16{dlpack::kBfloat, 16, 1};
constexpr DataType kFloat64{dlpack::kFloat, 64, 1};
constexpr DataType kOther{0, 0, 0};

/// What is known about torch, looked up once at import. The references live as long as the process.
struct Torch {
  std::vector<PyTypeObject*> plain_types;              // no subclass: those may lie about memory
  std::vector<std::pair<PyObject*, DataType>> dtypes;  // torch.float32 and so on
  PyObject* requires_grad = nullptr;                   // descriptors of torch.Tensor
  PyObject* is_neg = nullptr;
  PyObject* is_conj = nullptr;
  const ExchangeApi* api = nullptr;
  Shims shims;
  std::array<DataType, 64> shim_dtypes{};  // by torch's number; kOther until one was seen
};

Torch& torch() {
  static Torch instance;
  return instance;
}

/// One tensor as found, before anything is asked of it.
struct RawTensor {
  void* data = nullptr;
  std::int64_t numel = 0;
  DataType dtype = kOther;
  dlpack::Device device{};
  bool dense = false;
};

/// Whether the elements fill their memory without gaps or overlap, in any order of dimensions.
bool is_dense(int ndim, const std::int64_t* shape, const std::int64_t* strides) {
  std::int64_t expected = 1;
  int dim = ndim - 1;
  for (; dim >= 0 && (shape[dim] == 1 || strides[dim] == expected); --dim) expected *= shape[dim];
  if (dim < 0) return true;  // contiguous
  std::vector<int> order(static_cast<std::size_t>(ndim));
  for (int i = 0; i < ndim; ++i) order[static_cast<std::size_t>(i)] = i;
  std::sort(order.begin(), order.end(), [&](int a, int b) { return strides[a] < strides[b]; });
  expected = 1;
  for (const int i : order) {
    if (shape[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::int64_t count(int ndim, const std::int64_t* shape) {
  std::int64_t numel = 1;
  for (int i = 0; i < ndim; ++i) numel *= shape[i];
  return numel;
}

bool is_contiguous(int ndim, const std::int64_t* shape, const std::int64_t* strides) {
  std::int64_t expected = 1;
  int dim = ndim - 1;
  for (; dim >= 0 && (shape[dim] == 1 || strides[dim] == expected); --dim) expected *= shape[dim];
  return dim < 0 || count(ndim, shape) == 0;
}

std::optional<RawTensor> read_with_api(py::handle object, const ExchangeApi& api) {
  dlpack::Tensor found;
  if (api.tensor_from_py_object(object.ptr(), &found) != 0) {
    PyErr_Clear();  // sparse, meta and the like have no address; the caller treats them apart
    return std::nullopt;
  }
  RawTensor raw;
  raw.data = static_cast<char*>(found.data) + found.byte_offset;
  raw.numel = count(found.ndim, found.shape);
  raw.dtype = found.dtype;
  raw.device = found.device;
  raw.dense = raw.numel == 0 || is_dense(found.ndim, found.shape, found.strides);
  return raw;
}

std::optional<RawTensor> read_with_attributes(py::handle object) {
  RawTensor raw;
  const py::object device = object.attr("device");
  const auto type = device.attr("type").cast<std::string>();
  if (type != "cpu" && type != "cuda") return std::nullopt;
  raw.device = type == "cpu" ? dlpack::Device{dlpack::kCpu, 0}
                             : dlpack::Device{dlpack::kCuda, device.attr("index").cast<int>()};
  if (object.attr("is_sparse").cast<bool>() || object.attr("is_mkldnn").cast<bool>())
    return std::nullopt;
  const py::object dtype = object.attr("dtype");
  for (const auto& [known, code] : torch().dtypes)
    if (known == dtype.ptr()) raw.dtype = code;
  const auto shape = object.attr("size")().cast<std::vector<std::int64_t>>();
  const auto strides = object.attr("stride")().cast<std::vector<std::int64_t>>();
  const int ndim = static_cast<int>(shape.size());
  raw.numel = count(ndim, shape.data());
  raw.dense = raw.numel == 0 || is_dense(ndim, shape.data(), strides.data());
  raw.data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<std::uintptr_t>());
  return raw;
}

bool requires_grad(py::handle object) {
  if (torch().shims) return torch().shims.requires_grad(Shims::impl_of(object.ptr()));
  PyObject* getter = torch().requires_grad;
  return !py::reinterpret_steal<py::object>(
              Py_TYPE(getter)->tp_descr_get(getter, object.ptr(),
                                            py::type::handle_of(object).ptr()))
              .is(py::handle(Py_False));
}

/// Reads a strided tensor in host memory whose dtype was seen before.
bool read_with_shims(py::handle object, dlpack::Tensor& found) {
  const Shims& shims = torch().shims;
  if (!shims) return false;
  const Shims::Handle handle = Shims::handle_of(object.ptr());
  std::int32_t layout = -1;
  std::int32_t device_type = -1;
  std::int32_t dtype = -1;
  std::int64_t ndim = 0;
  if (shims.layout(handle, &layout) != 0 || layout != 0 ||                 // c10::Layout::Strided
      shims.device_type(handle, &device_type) != 0 || device_type != 0 ||  // c10::DeviceType::CPU
      shims.dtype(handle, &dtype) != 0)
    return false;
  const auto& known = torch().shim_dtypes;
  if (dtype < 0 || dtype >= static_cast<std::int32_t>(known.size())) return false;
  found.dtype = known[static_cast<std::size_t>(dtype)];
  if (found.dtype == kOther || shims.dim(handle, &ndim) != 0 ||
      shims.sizes(handle, &found.shape) != 0 || shims.strides(handle, &found.strides) != 0 ||
      shims.data_ptr(handle, &found.data) != 0)
    return false;
  found.ndim = static_cast<std::int32_t>(ndim);
  found.byte_offset = 0;
  return true;
}

/// Remembers what DLPack calls the dtype of a tensor, for the next one of it.
void learn_dtype(py::handle object, DataType dtype) {
  const Shims& shims = torch().shims;
  std::int32_t number = -1;
  auto& known = torch().shim_dtypes;
  if (shims && shims.dtype(Shims::handle_of(object.ptr()), &number) == 0 && number >= 0 &&
      number < static_cast<std::int32_t>(known.size()))
    known[static_cast<std::size_t>(number)] = dtype;
}

/// Whether autograd follows the tensor, or its values are not what its memory says. Integers have
/// neither. A negated view is the imaginary part of a conjugate, so two elements leave a gap.
bool has_flags(py::handle object, DataType dtype, std::int64_t numel) {
  if (dtype.code == dlpack::kInt || dtype.code == dlpack::kUInt || dtype.code == dlpack::kBool)
    return false;
  const auto calls = [&](PyObject* method) {
    PyObject* self = object.ptr();
    return !py::reinterpret_steal<py::object>(PyObject_Vectorcall(method, &self, 1, nullptr))
                .is(py::handle(Py_False));
  };
  return requires_grad(object) || (numel <= 1 && calls(torch().is_neg)) ||
         (dtype.code == dlpack::kComplex && (calls(torch().is_conj) || calls(torch().is_neg)));
}

bool is_plain(py::handle object) {
  const auto& types = torch().plain_types;
  return std::find(types.begin(), types.end(), Py_TYPE(object.ptr())) != types.end();
}

std::optional<RawTensor> read(py::handle object) {
  if (!is_plain(object)) return std::nullopt;
  return torch().api != nullptr ? read_with_api(object, *torch().api)
                                : read_with_attributes(object);
}

std::optional<DType> dtype_of(DataType dtype) {
  if (dtype == kFloat32) return DType::kFloat32;
  if (dtype == kBFloat16) return DType::kBFloat16;
  if (dtype == kFloat16) return DType::kFloat16;
  return std::nullopt;
}

bool is_on(dlpack::Device found, dlpack::Device wanted) {
  if (wanted.type == dlpack::kCpu)
    return found.type == dlpack::kCpu || found.type == dlpack::kCudaHost;  // pinned memory
  return found.type == wanted.type && found.index == wanted.index;
}

/// Says whether an address came before, so that no two threads write the same memory.
class AddressSet {
 public:
  explicit AddressSet(std::size_t expected) {
    std::size_t size = 16;
    while (size < 2 * expected) size *= 2;
    slots_.resize(size, nullptr);
  }
  bool insert(void* address) {
    const std::size_t mask = slots_.size() - 1;
    // Fibonacci hashing; allocators align to 64 bytes, so the low bits say nothing.
    std::size_t i =
        (reinterpret_cast<std::uintptr_t>(address) * 0x9e3779b97f4a7c15ULL >> 20) & mask;
    for (; slots_[i] != nullptr; i = (i + 1) & mask)
      if (slots_[i] == address) return false;
    slots_[i] = address;
    return true;
  }

 private:
  std::vector<void*> slots_;
};

/// Fetches a tensor's metadata before it is read; harmless where this torch has them elsewhere.
void prefetch_tensor(PyObject* object) {
  if (!is_plain(object)) return;
  const char* metadata = static_cast<const char*>(Shims::impl_of(object));
  for (int line = 0; line < 3; ++line) __builtin_prefetch(metadata + 64 * line);
}

PackedTensors pack(const py::object& tensors, int device_index) {
  const dlpack::Device device = device_index < 0 ? dlpack::Device{dlpack::kCpu, 0}
                                                 : dlpack::Device{dlpack::kCuda, device_index};
  PackedTensors packed;
  packed.device_index = device_index;
  packed.tensors = py::reinterpret_steal<py::tuple>(PySequence_Tuple(tensors.ptr()));
  if (!packed.tensors) throw py::error_already_set();
  const auto size = PyTuple_GET_SIZE(packed.tensors.ptr());
  packed.views.reserve(static_cast<std::size_t>(size));
  AddressSet seen(static_cast<std::size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    prefetch_tensor(
        PyTuple_GET_ITEM(packed.tensors.ptr(), std::min(i + kPrefetchTensors, size - 1)));
    const std::optional<RawTensor> raw = read(PyTuple_GET_ITEM(packed.tensors.ptr(), i));
    const std::optional<DType> dtype = raw ? dtype_of(raw->dtype) : std::nullopt;
    if (!dtype || !raw->dense || !is_on(raw->device, device)) {
      packed.rest.push_back(i);
    } else if (raw->numel > 0 && !seen.insert(raw->data)) {
      packed.rest.push_back(i);
    } else if (raw->numel > 0) {
      packed.views.push_back({raw->data, raw->numel, *dtype});
      packed.num_chunks += chunks_of(raw->numel);
      packed.has_float16 |= *dtype == DType::kFloat16;
    }
  }
  return packed;
}

void bind_torch(bool use_exchange_table, bool use_shims) {
  const py::module_ module = py::module_::import("torch");
  const py::object tensor = module.attr("Tensor");
  Torch bound;
  for (const py::object& type : {tensor, py::object(module.attr("nn").attr("Parameter"))})
    bound.plain_types.push_back(reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()));
  for (const auto& [name, dtype] : {std::pair{"float32", kFloat32},
                                    {"float16", kFloat16},
                                    {"bfloat16", kBFloat16},
                                    {"float64", kFloat64}})
    bound.dtypes.emplace_back(py::object(module.attr(name)).release().ptr(), dtype);
  bound.requires_grad = py::object(tensor.attr("requires_grad")).release().ptr();
  bound.is_neg = py::object(tensor.attr("is_neg")).release().ptr();
  bound.is_conj = py::object(tensor.attr("is_conj")).release().ptr();
  constexpr const char* kName = "__dlpack_c_exchange_api__";
  if (use_exchange_table && py::hasattr(tensor, kName)) {
    const py::object capsule = tensor.attr(kName);
    const auto* api =
        static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
    if (api == nullptr) throw py::error_already_set();
    if (api->version.major == dlpack::kMajorVersion && api->tensor_from_py_object != nullptr)
      bound.api = api;
  }
  if (use_shims && bound.api != nullptr) bound.shims = find_shims(module);
  torch() = std::move(bound);
}

}  // namespace

void* data_of(py::handle tensor, DataType dtype, std::int64_t numel, const char* argument) {
  const std::optional<RawTensor> raw = read(tensor);
  if (!raw || !(raw->dtype == dtype) || !raw->dense || raw->numel < numel)
    throw py::type_error(std::string(argument) + ": expected a dense float" +
                         std::to_string(dtype.bits) + " tensor of at least " +
                         std::to_string(numel) + " elements");
  return raw->data;
}

bool read_host_tensor(py::handle object, HostTensor& tensor) {
  if (torch().api == nullptr || !is_plain(object)) return false;
  dlpack::Tensor found;
  if (!read_with_shims(object, found)) {
    if (torch().api->tensor_from_py_object(object.ptr(), &found) != 0) {
      PyErr_Clear();  // sparse, quantized and the like
      return false;
    }
    if (!is_on(found.device, {dlpack::kCpu, 0})) return false;
    learn_dtype(object, found.dtype);
  }
  tensor.data = static_cast<char*>(found.data) + found.byte_offset;
  tensor.ndim = found.ndim;
  tensor.shape = found.shape;
  tensor.numel = count(found.ndim, found.shape);
  tensor.dtype = found.dtype;
  return is_contiguous(found.ndim, found.shape, found.strides) &&
         !has_flags(object, found.dtype, tensor.numel);
}

void* current_stream(int device_index) {
  void* stream = nullptr;
  if (torch().api == nullptr)
    throw std::runtime_error("this torch has no DLPack exchange table: pass the stream");
  if (torch().api->current_work_stream(dlpack::kCuda, device_index, &stream) != 0)
    throw py::error_already_set();
  return stream;
}

void define_tensors(py::module_& module) {
  py::class_<PackedTensors>(module, "PackedTensors",
                            "A list of tensors of one device, unpacked once for several ops.")
      .def_readonly("rest", &PackedTensors::rest)
      .def_readonly("device_index", &PackedTensors::device_index)
      .def_readonly("has_float16", &PackedTensors::has_float16)
      .def_readonly("num_chunks", &PackedTensors::num_chunks)
      .def_readonly("tensors", &PackedTensors::tensors);
  module.def("pack", &pack, py::arg("tensors"), py::arg("device_index"),
             "Read the memory of a list of tensors; device_index is -1 for the CPU.");
  module.def("bind_torch", &bind_torch, py::arg("use_exchange_table"), py::arg("use_shims") = true,
             "Look torch's types up; without the exchange table, tensors are read by attribute.");
  module.def(
      "has_exchange_table", [] { return torch().api != nullptr; },
      "Whether tensors are read through torch's DLPack exchange table.");
  bind_torch(true, true);
}

}  // namespace fastamp
