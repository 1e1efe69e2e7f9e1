// The timer's regions as a Python type written against the C API: a `with` costs a third of
// pybind11's. Everything here runs with the GIL held, and nothing that a method calls throws.
#include "module.h"

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>

#include "timer/clock.h"

namespace fastamp {
namespace {

namespace py = pybind11;

/// One path of nested regions, in all threads.
struct Region {
  PyObject_HEAD PyObject* path;
  PyObject* children;  // by name; new ones are made in Python
  PyObject* begin;     // the same object for all regions of one timer
  bool always;
  Series series;
};

/// A region that is open in this thread, and what its `begin` returned.
struct Frame {
  Region* region;
  PyObject* end;
  std::int64_t start_ns;
};

// Plain arrays, so that access needs no check whether they are initialized. All timers share them:
// most often the last frame belongs to the timer that looks for its own.
constexpr std::size_t kMaxDepth = 1000;
thread_local Frame frames[kMaxDepth];
thread_local std::size_t depth = 0;

// References that live as long as the process.
PyTypeObject* region_type = nullptr;
PyObject* profiler_globals = nullptr;  // torch.autograd.profiler's: reading a flag costs 8 ns
PyObject* profiler_flag = nullptr;

Region* as_region(PyObject* self) { return reinterpret_cast<Region*>(self); }

PyObject* too_many(const Region* region) {
  return PyErr_Format(PyExc_RuntimeError, "region %R: too many are open", region->path);
}

PyObject* region_enter(PyObject* self, PyObject*) {
  Region* region = as_region(self);
  if (depth == kMaxDepth) return too_many(region);
  PyObject* end = nullptr;
  if (region->always || PyDict_GetItemWithError(profiler_globals, profiler_flag) == Py_True) {
    end = PyObject_CallOneArg(region->begin, self);
    if (end == nullptr) return nullptr;
  }
  if (depth == kMaxDepth) {  // `begin` is Python, which may have opened others
    Py_XDECREF(end);
    return too_many(region);
  }
  Py_INCREF(self);
  Py_INCREF(self);
  frames[depth++] = {region, end, now_ns()};
  return self;
}

bool close_frame(std::size_t index, std::int64_t end_ns) {
  const Frame frame = frames[index];
  std::copy(frames + index + 1, frames + depth--, frames + index);
  frame.region->series.add(end_ns - frame.start_ns);
  bool succeeds = true;
  if (frame.end != nullptr) {
    PyObject* result = PyObject_CallFunction(frame.end, "LL", frame.start_ns, end_ns);
    succeeds = result != nullptr;
    Py_XDECREF(result);
    Py_DECREF(frame.end);
  }
  Py_DECREF(frame.region);
  return succeeds;
}

/// Returns the place of an open region, counted from 1; 0 if it has been closed.
std::size_t place_of(const Region* region, std::int64_t start_ns) {
  std::size_t place = depth;
  while (place > 0 &&
         (frames[place - 1].region != region || frames[place - 1].start_ns != start_ns))
    --place;
  return place;
}

PyObject* region_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  const std::int64_t end_ns = now_ns();
  const Region* region = as_region(self);
  std::size_t own = depth;
  while (own > 0 && frames[own - 1].region != region) --own;
  if (own == 0) Py_RETURN_NONE;  // closed with a region around it
  const std::int64_t start_ns = frames[own - 1].start_ns;
  PyObject *type = nullptr, *error = nullptr, *traceback = nullptr;
  // A region's `end` is Python, which may close others: the garbage collector ends generators.
  while ((own = place_of(region, start_ns)) > 0) {
    std::size_t top = depth;
    while (frames[top - 1].region->begin != region->begin) --top;
    if (!close_frame(top - 1, end_ns)) {  // the others end all the same
      if (type == nullptr) PyErr_Fetch(&type, &error, &traceback);
      PyErr_Clear();
    }
    if (top == own) break;
  }
  if (type == nullptr) Py_RETURN_NONE;
  PyErr_Restore(type, error, traceback);
  return nullptr;
}

Region* innermost_of(Region* region) {
  for (std::size_t i = depth; i > 0; --i)
    if (frames[i - 1].region->begin == region->begin) return frames[i - 1].region;
  return region;
}

PyObject* region_innermost(PyObject* self, PyObject*) {
  return Py_NewRef(reinterpret_cast<PyObject*>(innermost_of(as_region(self))));
}

/// The known region of a name inside the innermost open one, or None.
PyObject* region_find(PyObject* self, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(innermost_of(as_region(self))->children, name);
  if (found == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  return Py_NewRef(found == nullptr ? Py_None : found);
}

PyObject* region_add(PyObject* self, PyObject* duration_ns) {
  const long long ns = PyLong_AsLongLong(duration_ns);
  if (ns == -1 && PyErr_Occurred() != nullptr) return nullptr;
  as_region(self)->series.add(ns);
  Py_RETURN_NONE;
}

PyObject* region_figures(PyObject* self, PyObject*) {
  const Series& series = as_region(self)->series;
  const auto* histogram = reinterpret_cast<const char*>(series.histogram.data());
  return Py_BuildValue("LLLLN", series.count, series.sum_ns, series.min_ns, series.max_ns,
                       PyBytes_FromStringAndSize(histogram, sizeof(series.histogram)));
}

PyObject* region_reset(PyObject* self, PyObject*) {
  as_region(self)->series = Series{};
  Py_RETURN_NONE;
}

void region_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(as_region(self)->path);
  Py_XDECREF(as_region(self)->children);
  Py_XDECREF(as_region(self)->begin);
  type->tp_free(self);
  Py_DECREF(type);
}

void make_type() {
  static PyMethodDef methods[] = {
      {"__enter__", region_enter, METH_NOARGS, "__enter__(self: Region) -> Region"},
      {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(region_exit)),
       METH_FASTCALL,
       "__exit__(self: Region, kind: object, error: object, traceback: object) -> None"},
      {"innermost", region_innermost, METH_NOARGS, "innermost(self: Region) -> Region"},
      {"find", region_find, METH_O, "find(self: Region, name: object) -> Region | None"},
      {"add", region_add, METH_O, "add(self: Region, duration_ns: int) -> None"},
      {"figures", region_figures, METH_NOARGS, "figures(self: Region) -> tuple"},
      {"reset", region_reset, METH_NOARGS, "reset(self: Region) -> None"},
      {nullptr, nullptr, 0, nullptr}};
  static PyMemberDef members[] = {
      {"path", T_OBJECT_EX, offsetof(Region, path), READONLY, nullptr},
      {"children", T_OBJECT_EX, offsetof(Region, children), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(region_dealloc)},
                                {Py_tp_methods, methods},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {"fastamp._native.Region", sizeof(Region), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  region_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (region_type == nullptr) throw py::error_already_set();
}

py::object make_region(const py::str& path, const py::object& begin, bool always) {
  PyObject* made = region_type->tp_alloc(region_type, 0);  // all zero
  if (made == nullptr) throw py::error_already_set();
  Region* region = as_region(made);
  region->path = path.inc_ref().ptr();
  region->children = py::dict().release().ptr();
  region->begin = begin.inc_ref().ptr();
  region->always = always;
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace

void define_timer(py::module_& module) {
  make_type();
  const py::object globals = py::module_::import("torch.autograd.profiler").attr("__dict__");
  profiler_globals = globals.inc_ref().ptr();
  profiler_flag = py::str("_is_profiler_enabled").release().ptr();
  module.add_object("Region", reinterpret_cast<PyObject*>(region_type));
  module.def("make_region", &make_region, py::arg("path"), py::arg("begin"), py::arg("always"));
}

}  // namespace fastamp
