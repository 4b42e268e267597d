#include "bindings/commhooks/register.h"
#include "comm/completion_queue.h"
#include "comm/joined_work.h"
#include "comm/ring_gather.h"

#include <pybind11/chrono.h>

namespace py = pybind11;

namespace commhooks {
namespace {

// See Note [Locks and the GIL].
struct DeleteWithoutGil {
  void operator()(CompletionQueue* queue) const {
    const py::gil_scoped_release no_gil;
    delete queue;
  }
};

}  // namespace

void register_comm(py::module_& module) {
  py::class_<CompletionQueue, std::unique_ptr<CompletionQueue, DeleteWithoutGil>>(
      module, "CompletionQueue", R"(
A queue of integer tokens on which one thread can wait for many collectives.)")
      .def(py::init<>())
      .def(
          "put", &CompletionQueue::put, py::arg("token"), py::call_guard<py::gil_scoped_release>(),
          "Append `token`.")
      .def(
          "watch", &CompletionQueue::watch, py::arg("work"), py::arg("token"), py::arg("stage") = 0,
          py::call_guard<py::gil_scoped_release>(),
          R"(
Append `token` once `work` has completed, with or without an error. The thread that completes the
work does not take the GIL. Works without a future (point-to-point on Gloo) are waited for in the
order of the calls, by one thread per `stage`.)")
      .def("forget", &CompletionQueue::forget, py::call_guard<py::gil_scoped_release>(), R"(
Let new threads wait for the works that no thread waits for yet, and for later ones. Call it when
some work may never complete.)")
      .def(
          "get",
          [](CompletionQueue& self, std::optional<double> timeout_seconds) {
            py::gil_scoped_release no_gil;
            std::optional<std::chrono::duration<double>> timeout;
            if (timeout_seconds) {
              timeout.emplace(*timeout_seconds);
            }
            return self.get(timeout);
          },
          py::arg("timeout_seconds") = py::none(),
          R"(
Remove and return the oldest token, waiting for one without the GIL. Return None after
`timeout_seconds`.)");

  module.def(
      "join_works",
      [](std::vector<c10::intrusive_ptr<c10d::Work>> works) -> c10::intrusive_ptr<c10d::Work> {
        return c10::make_intrusive<JoinedWork>(std::move(works));
      },
      py::arg("works"), R"(
Return one Work that completes when all of `works` have completed, with their first error. For
point-to-point on Gloo; it has no future.)");

  module.def(
      "ring_gather",
      [](c10::intrusive_ptr<c10d::Backend> group,
         std::vector<at::Tensor> parts) -> c10::intrusive_ptr<c10d::Work> {
        return c10::make_intrusive<RingGather>(std::move(group), std::move(parts));
      },
      py::arg("group"), py::arg("parts"), py::call_guard<py::gil_scoped_release>(), R"(
Gather `parts`, contiguous CPU tensors of equal length, one per rank of the Gloo group; the part
of this rank is the input. Uses point-to-point messages. Return a Work without a future, which
only makes progress while a thread waits for it.)");
}

}  // namespace commhooks
