// Averages among ranks of one host through memory that they share.
#pragma once

#include "host/arena.h"
#include "reducer/hook.h"

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

namespace commhooks {

// Note [Host memory]
// ~~~~~~~~~~~~~~~~~~
// Each rank packs its gradients into memory that its peers have mapped, and sums one slice of the
// bucket over all ranks, in place. Then it copies the other slices from where they were summed:
//
//                      slice 0   slice 1   slice 2
//   bucket of rank 0 [ sum 0   | grads   | grads   ]      sum r = the slices r of ranks 0 + 1 + 2,
//   bucket of rank 1 [ grads   | sum 1   | grads   ]              by rank r
//   bucket of rank 2 [ grads   | grads   | sum 2   ]
//                        \         |         /
//   every bucket     [ sum 0   | sum 1   | sum 2   ]
//
// Each rank counts its operations, in the same order as its peers, in memory that they can see:
//
//   packed   its gradients are there            all ranks have packed  -> it sums its slice
//   summed   its slice is an average            all have summed        -> it copies their slices
//   copied   its bucket is the average          all have copied        -> complete
//
// Then nobody reads the bucket any more, and users may overwrite gradients that are views of it.
//
// No thread is needed: whoever adds an operation or waits for one does what can be done for all of
// them. A rank that has nothing to do sleeps on its doorbell, a futex in its own memory, which its
// peers ring whenever a counter of theirs changes. They skip the call to the kernel if nobody
// sleeps there. The sleeper wakes up now and then to see whether a peer has died.
//
// A rank maps two slices of each bucket of a peer, for sum and copy, so the address space it needs
// does not grow with the number of ranks. If it cannot allocate or map memory in the middle of a
// step, it takes part in nothing more, and the peers quote its reason.
class HostGroup final : public Transport, public std::enable_shared_from_this<HostGroup> {
 public:
  // The address of a rank for its peers: the id of its process, the descriptor of its arena, the
  // offset of its control block there, and the nonce in that block.
  using Address = std::tuple<int64_t, int64_t, int64_t, uint64_t>;

  // Throws std::system_error if the system lacks what is needed.
  static std::shared_ptr<HostGroup> create();
  // Returns the group that has allocated `tensor`; null if there is none.
  static std::shared_ptr<HostGroup> of(const at::Tensor& tensor);
  ~HostGroup() override;

  Address address() const;
  // Connects the ranks of this host, this one included, by their numbers in the process group.
  // Throws std::exception if that fails.
  void connect(const std::map<int64_t, Address>& addresses);
  // Throws std::system_error unless this process may share `shared` bytes more, and map `mapped`.
  void check_room(size_t shared, size_t mapped) const;
  const std::vector<int64_t>& ranks() const {
    return ranks_;
  }

  const char* name() const override {
    return "host memory";
  }
  int size() const override {
    return static_cast<int>(ranks_.size());
  }
  at::Tensor allocate(int64_t numel, c10::ScalarType dtype) override;
  std::unique_ptr<PendingResult> average(
      const at::Tensor& tensor,
      c10::ScalarType wire_dtype,
      size_t bucket,
      std::chrono::milliseconds timeout) override;

  // The offset at which peers find `tensor`, which `allocate` returned.
  int64_t offset_of(const at::Tensor& tensor) const;
  // Returns the tensors that ranks have at these offsets, like `own`. They are not copies: agree on
  // who writes when.
  std::vector<at::Tensor> tensors_at(
      const std::map<int64_t, int64_t>& offsets, const at::Tensor& own) const;

  // The interval at which a sleeping thread checks that its peers live. Tests make it long, so that
  // a lost wake-up shows.
  void set_liveness_interval(std::chrono::milliseconds interval) {
    liveness_interval_ = interval;
  }

 private:
  struct Control;
  struct Slot;
  struct Slice;
  struct Memory;
  struct Peer;
  struct Operation;
  class Result;
  // A mapped part of a peer's memory: the slice that this rank sums, the one that the peer sums, or
  // everything.
  enum Mapping { kSummedHere, kSummedThere, kWhole, kMappings };
  using Clock = std::chrono::steady_clock;
  using Counter = std::atomic<int64_t>;

  HostGroup();

  static void progress_all();
  void progress();
  bool sum_next_locked();
  bool copy_next_locked(std::vector<std::shared_ptr<Operation>>& done);
  char* map(Memory& memory, int rank, Mapping mapping, int64_t offset, const Slice& slice) const;
  bool all_exceed(Counter Control::* counter, int64_t number) const;
  void advance(Counter Control::* counter);
  void ring() const;

  void wait(const std::function<bool()>& condition, std::chrono::milliseconds timeout);
  std::string find_loss(bool asks_system) const;
  std::string describe_late() const;
  void abort(const std::string& why);
  std::string describe(const std::system_error& error) const;
  void check_failed_locked() const;

  const std::shared_ptr<Arena> arena_;
  const std::unique_ptr<Arena::Allocation> control_memory_;
  Control& control_;

  // The ranks of this host, this one included, which is `peers_[rank_]`.
  int rank_ = 0;
  std::vector<int64_t> ranks_;  // in the process group
  std::vector<Peer> peers_;

  std::atomic<std::chrono::milliseconds> liveness_interval_{std::chrono::milliseconds(20)};

  mutable std::mutex mutex_;                           // guards what follows
  std::deque<std::shared_ptr<Operation>> operations_;  // not copied yet, the oldest first
  size_t summed_ = 0;                                  // of these
  std::string failure_;                                // empty if there is none
};

}  // namespace commhooks
