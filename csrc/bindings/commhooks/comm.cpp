#include "bindings/commhooks/register.h"
#include "comm/joined_work.h"
#include "comm/ring_gather.h"

namespace py = pybind11;

namespace commhooks {

void register_comm(py::module_& module) {
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
