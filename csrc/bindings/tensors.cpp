// Reads tensors through torch's DLPack exchange table (torch 2.10 and later), or attribute by
// attribute where it is absent.
#include "bindings/tensors.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/math.h"

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

constexpr bool operator==(DataType a, DataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

/// What is known about torch, looked up once at import. The references live as long as the process.
struct Torch {
  std::vector<PyTypeObject*> plain_types;              // no subclass: those may lie about memory
  std::vector<std::pair<PyObject*, DataType>> dtypes;  // torch.float32 and so on
  const ExchangeApi* api = nullptr;
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

/// Fetches a tensor's metadata before it is read. Their address is the word behind the object's
/// header (torch 2.13); in a torch where it is another word, the wrong lines are fetched, unread.
void prefetch_tensor(PyObject* object) {
  if (!is_plain(object)) return;
  const char* metadata;
  std::memcpy(&metadata, reinterpret_cast<const char*>(object) + sizeof(PyObject), sizeof metadata);
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

void bind_torch(bool use_exchange_table) {
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
  constexpr const char* kName = "__dlpack_c_exchange_api__";
  if (use_exchange_table && py::hasattr(tensor, kName)) {
    const py::object capsule = tensor.attr(kName);
    const auto* api =
        static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
    if (api == nullptr) throw py::error_already_set();
    if (api->version.major == dlpack::kMajorVersion && api->tensor_from_py_object != nullptr)
      bound.api = api;
  }
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
  module.def("bind_torch", &bind_torch, py::arg("use_exchange_table"),
             "Look torch's types up; without the exchange table, tensors are read by attribute.");
  module.def(
      "has_exchange_table", [] { return torch().api != nullptr; },
      "Whether tensors are read through torch's DLPack exchange table.");
  bind_torch(true);
}

}  // namespace fastamp
