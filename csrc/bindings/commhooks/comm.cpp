#include "comm/completion_queue.h"
#include "comm/joined_work.h"
#include "bindings/commhooks/register.h"
#include "comm/ring_gather.h"

#include <pybind11/chrono.h>

namespace py = pybind11;

namespace commhooks {

void register_comm(py::module_& module) {
  py::class_<CompletionQueue>(module, "CompletionQueue", R"(
A queue of integer tokens on which one thread can wait for many collectives.)")
      .def(py::init<>())
      .def("put", &CompletionQueue::put, py::arg("token"), "Append `token`.")
      .def(
          "watch", &CompletionQueue::watch, py::arg("work"), py::arg("token"), py::arg("stage") = 0,
          py::call_guard<py::gil_scoped_release>(),
          R"(
Append `token` once `work` has completed, with or without an error. The thread that completes the
work does not take the GIL. Works without a future (point-to-point on Gloo) are waited for in the
order in which they come, those of each `stage` by a thread of its own.)")
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
Remove and return the oldest token, waiting for one without the GIL; `None` once `timeout_seconds`
have passed.)");

  module.def(
      "join_works",
      [](std::vector<c10::intrusive_ptr<c10d::Work>> works) -> c10::intrusive_ptr<c10d::Work> {
        return c10::make_intrusive<JoinedWork>(std::move(works));
      },
      py::arg("works"), R"(
One Work that completes when all of `works` have, with the first error among them. Made for
point-to-point on Gloo; has no future.)");

  module.def(
      "ring_gather",
      [](c10::intrusive_ptr<c10d::Backend> group,
         std::vector<at::Tensor> parts) -> c10::intrusive_ptr<c10d::Work> {
        return c10::make_intrusive<RingGather>(std::move(group), std::move(parts));
      },
      py::arg("group"), py::arg("parts"), py::call_guard<py::gil_scoped_release>(), R"(
Fill `parts`, contiguous CPU tensors of equal length, one per rank of the Gloo group, from the ranks
whose parts they are; this rank's is sent. Point to point; has no future, and goes on while somebody
waits for it.)");
}

}  // namespace commhooks
