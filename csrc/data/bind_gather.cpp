// Hands the loader's jobs to the gather queue without the GIL. Memory comes as addresses: Python
// keeps what they point to alive.
#include "module.h"

#include <pybind11/stl.h>

#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "data/gather.h"

namespace fastamp {
namespace {

namespace py = pybind11;

// How long Ctrl-C may have to wait.
constexpr double kSignalCheck_s = 0.1;

using ColumnArguments = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t, Cast>;

/// A queue with the objects that own the memory of its columns and jobs.
struct BoundQueue {
  py::object columns_owner;
  std::deque<py::object> job_owners;
  std::unique_ptr<GatherQueue> queue;  // last, so that it goes first: its threads read the memory
};

std::unique_ptr<BoundQueue> make(const std::vector<ColumnArguments>& columns, int depth,
                                 int num_threads, py::object owner) {
  std::vector<Column> unpacked;
  for (const auto& [address, num_rows, row_stride, row_nbytes, cast] : columns)
    unpacked.push_back(
        {reinterpret_cast<const char*>(address), num_rows, row_stride, row_nbytes, cast});
  auto bound = std::make_unique<BoundQueue>();
  bound->columns_owner = std::move(owner);
  bound->queue = make_gather_queue(std::move(unpacked), depth, num_threads);
  return bound;
}

void submit(BoundQueue& bound, std::uintptr_t indices, std::int64_t count,
            const std::vector<std::uintptr_t>& outputs, py::object owner) {
  GatherJob job{reinterpret_cast<const std::int64_t*>(indices), count, {}};
  for (const std::uintptr_t output : outputs)
    job.outputs.push_back(reinterpret_cast<char*>(output));
  bound.queue->submit(std::move(job));
  bound.job_owners.push_back(std::move(owner));
}

std::tuple<py::object, double, std::int64_t, std::int64_t> wait(BoundQueue& bound) {
  for (;;) {
    std::optional<GatherResult> result;
    {
      const py::gil_scoped_release no_gil;
      result = bound.queue->wait(kSignalCheck_s);
    }
    if (result) {
      py::object owner = std::move(bound.job_owners.front());
      bound.job_owners.pop_front();
      return {std::move(owner), result->elapsed_s, result->bad_position, result->bad_column};
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

}  // namespace

void define_gather(py::module_& module) {
  py::enum_<Cast>(module, "Cast")
      .value("NONE", Cast::kNone)
      .value("UINT8", Cast::kUInt8ToInt64)
      .value("UINT16", Cast::kUInt16ToInt64)
      .value("INT32", Cast::kInt32ToInt64);
  py::class_<BoundQueue>(module, "GatherQueue",
                         "Gathers batches on threads of its own, in the order of submission.")
      .def(py::init(&make), py::arg("columns"), py::arg("depth"), py::arg("num_threads"),
           py::arg("owner"),
           "Columns are (address, num_rows, row_stride, row_nbytes, cast), sizes in bytes; owner "
           "keeps their memory alive.")
      .def("submit", &submit, py::arg("indices"), py::arg("count"), py::arg("outputs"),
           py::arg("owner"),
           "Add a batch: the address of int64 indices, that of each column's output, and what "
           "keeps them alive.")
      .def("wait", &wait,
           "Wait for the oldest batch: (its owner, elapsed_s, position of a bad index or -1, its "
           "column).");
}

}  // namespace fastamp
