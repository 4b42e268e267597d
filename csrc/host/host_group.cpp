#include "host/host_group.h"

#include "host/sums.h"
#include "shared/lock.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <system_error>

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace commhooks {
namespace {

using std::chrono::milliseconds;

constexpr size_t kCacheLine = 64;  // bytes

// The futex on which threads of a process sleep, in the first page of its arena.
struct Doorbell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleepers{0};

  void ring() {
    rings.fetch_add(1);
    if (sleepers.load() > 0) {
      futex(FUTEX_WAKE, INT32_MAX, nullptr);
    }
  }

  // Sleeps until the number of rings is no longer `seen`; returns whether the time was up instead.
  // Whoever rings before `sleepers` counts this thread has changed `rings`, so the kernel does not
  // let it sleep.
  bool sleep(uint32_t seen, milliseconds at_most) {
    const auto nanoseconds = std::chrono::nanoseconds(at_most).count();
    const timespec limit{nanoseconds / 1000000000, nanoseconds % 1000000000};
    sleepers.fetch_add(1);
    const bool is_up = futex(FUTEX_WAIT, seen, &limit) != 0 && errno == ETIMEDOUT;
    sleepers.fetch_sub(1);
    return is_up;
  }

 private:
  int64_t futex(int operation, uint32_t value, const timespec* limit) {
    return syscall(SYS_futex, &rings, operation, value, limit, nullptr, 0);
  }
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

Doorbell& doorbell_in(char* first_page) {
  return *reinterpret_cast<Doorbell*>(first_page);
}

// A descriptor of the process with this id, which becomes readable when the process ends.
File watch_process(int64_t process) {
  constexpr int64_t kPidfdOpen = 434;  // SYS_pidfd_open, which older headers do not have
  return File(static_cast<int>(syscall(kPidfdOpen, process, 0)), "pidfd_open");
}

File open_file_of(int64_t process, int64_t file) {
  const std::string path = c10::str("/proc/", process, "/fd/", file);
  return File(open(path.c_str(), O_RDWR | O_CLOEXEC), path);
}

bool has_ended(const File& process) {
  pollfd descriptor{process.descriptor(), POLLIN, 0};
  return poll(&descriptor, 1, 0) > 0;
}

uint64_t random_number() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

void copy(const char* source, char* destination, size_t bytes) {
  constexpr int64_t kGrain = 1 << 17;  // bytes worth a thread
  at::parallel_for(0, static_cast<int64_t>(bytes), kGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(destination + begin, source + begin, static_cast<size_t>(end - begin));
  });
}

// All groups of this process.
std::mutex groups_mutex;
std::vector<std::weak_ptr<HostGroup>>& all_groups() {
  static auto* groups = new std::vector<std::weak_ptr<HostGroup>>;  // outlives all threads
  return *groups;
}

}  // namespace

// -------------------------------------------------------------------------------- shared by ranks

// A rank's part of an operation.
struct HostGroup::Slot {
  int64_t offset;  // in its arena
  int64_t bytes;
  uint64_t bucket;
  int64_t wire_dtype;

  // Whether ranks with these slots average the same bucket.
  bool matches(const Slot& other) const {
    return bytes == other.bytes && bucket == other.bucket && wire_dtype == other.wire_dtype;
  }
  std::string describe() const {
    const auto type = static_cast<c10::ScalarType>(wire_dtype);
    return c10::str("bucket ", bucket, " (", bytes, " bytes, averaged in ", type, ")");
  }
};

struct HostGroup::Control {
  uint64_t nonce = 0;
  alignas(kCacheLine) Counter packed{0};
  alignas(kCacheLine) Counter summed{0};
  alignas(kCacheLine) Counter copied{0};
  std::atomic<uint32_t> is_closed{0};  // the rank takes part in nothing more
  std::array<char, 512> failure = {};  // why, unless the group was destroyed; written before
  std::array<Slot, 256> slots = {};    // of the last operations, by number modulo the size

  Slot& slot(int64_t number) {
    return slots[static_cast<size_t>(number) % slots.size()];
  }
};

// ------------------------------------------------------------------------------- of this process

struct HostGroup::Peer {
  File arena;
  File process;
  Window first_page;
  Window control_window;

  Doorbell& doorbell() const {
    return doorbell_in(first_page.data());
  }
  Control& control() const {
    return *reinterpret_cast<Control*>(control_window.data());
  }
};

// Memory of this rank, and what is mapped of its peers' for the same purpose.
struct HostGroup::Memory {
  struct Mapped {
    int64_t offset = -1;  // of the peer's memory
    std::shared_ptr<Window> window;
    char* data = nullptr;
  };

  std::weak_ptr<HostGroup> group;
  std::unique_ptr<Arena::Allocation> own;
  std::vector<std::array<Mapped, kMappings>> peers;
};

struct HostGroup::Slice {
  size_t begin;
  size_t bytes;
};

struct HostGroup::Operation {
  const std::shared_ptr<Memory> memory;
  const at::Tensor tensor;
  const Slot slot;
  const int64_t number;
  std::atomic<bool> is_copied{false};

  // A whole number of cache lines, other than at the end.
  Slice slice(int rank, int size) const {
    const auto bytes = static_cast<size_t>(slot.bytes);
    const size_t length = (bytes / size + kCacheLine) / kCacheLine * kCacheLine;
    const size_t begin = std::min(rank * length, bytes);
    return {begin, std::min(length, bytes - begin)};
  }
};

// Owns what a tensor over shared memory needs.
template <typename Owner>
void release(void* owner) {
  delete static_cast<std::shared_ptr<Owner>*>(owner);
}

template <typename Owner>
at::Tensor tensor_over(
    char* data, std::shared_ptr<Owner> owner, int64_t numel, c10::ScalarType dtype) {
  c10::DataPtr pointer(
      data, new std::shared_ptr<Owner>(std::move(owner)), &release<Owner>, c10::kCPU);
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), nullptr, false);
  auto tensor = at::empty({0}, at::TensorOptions().dtype(dtype));
  return tensor.set_(std::move(storage), 0, {numel}, {1});
}

// Returns null if `tensor` is not of `tensor_over`.
template <typename Owner>
std::shared_ptr<Owner> owner_of(const at::Tensor& tensor) {
  const c10::DataPtr& pointer = tensor.storage().data_ptr();
  return pointer.get_deleter() == &release<Owner>
      ? *static_cast<const std::shared_ptr<Owner>*>(pointer.get_context())
      : nullptr;
}

class HostGroup::Result final : public PendingResult {
 public:
  Result(
      std::shared_ptr<HostGroup> group, std::shared_ptr<Operation> operation, milliseconds timeout)
      : group_(std::move(group)), operation_(std::move(operation)), timeout_(timeout) {}

  bool is_complete() override {
    if (!completed_ && is_copied_by_all()) {
      completed_ = Clock::now();
    }
    return completed_.has_value();
  }

  void wait() noexcept override {
    try {
      group_->wait([&] { return is_copied_by_all(); }, timeout_);
    } catch (...) {
      error_ = std::current_exception();
    }
    completed_ = completed_.value_or(Clock::now());
  }

  Clock::time_point completed() const override {
    return completed_.value_or(Clock::time_point());
  }

  at::Tensor result() override {
    if (error_) {
      std::rethrow_exception(error_);
    }
    return operation_->tensor;
  }

 private:
  bool is_copied_by_all() const {
    return operation_->is_copied && group_->all_exceed(&Control::copied, operation_->number);
  }

  std::shared_ptr<HostGroup> group_;
  std::shared_ptr<Operation> operation_;
  milliseconds timeout_;
  std::optional<Clock::time_point> completed_;
  std::exception_ptr error_;
};

// ------------------------------------------------------------------------------------ connecting

HostGroup::HostGroup()
    : arena_(Arena::of_process()),
      control_memory_(arena_->allocate(sizeof(Control))),
      control_(*new (control_memory_->data()) Control) {
  control_.nonce = random_number();
}

std::shared_ptr<HostGroup> HostGroup::create() {
  std::shared_ptr<HostGroup> group(new HostGroup);
  const std::lock_guard lock(groups_mutex);
  all_groups().push_back(group);
  return group;
}

HostGroup::~HostGroup() {
  control_memory_->keep();  // peers may still look at it
  if (arena_->is_of_this_process()) {
    control_.is_closed = 1;
    ring();
  }
}

HostGroup::Address HostGroup::address() const {
  return {getpid(), arena_->file(), control_memory_->offset(), control_.nonce};
}

void HostGroup::connect(const std::map<int64_t, Address>& addresses) {
  for (const auto& [rank, address] : addresses) {
    const auto [process, file, offset, nonce] = address;
    File arena = open_file_of(process, file);
    Window first_page(arena.descriptor(), 0, page_bytes());
    Window control(arena.descriptor(), offset, control_memory_->bytes());
    if (nonce == control_.nonce) {
      rank_ = static_cast<int>(peers_.size());
    }
    ranks_.push_back(rank);
    peers_.push_back(
        {std::move(arena), watch_process(process), std::move(first_page), std::move(control)});
    // Another process may have got this id in another namespace of processes.
    TORCH_CHECK(
        peers_.back().control().nonce == nonce, "Process ", process, " is not rank ", rank,
        ", which published its memory.");
  }
}

void HostGroup::check_room(size_t shared, size_t mapped) const {
  arena_->check_room(shared);
  check_address_space(std::max<size_t>(mapped, 1));
}

// -------------------------------------------------------------------------------------- tensors

at::Tensor HostGroup::allocate(int64_t numel, c10::ScalarType dtype) {
  const size_t bytes = numel * c10::elementSize(dtype);
  auto memory = std::make_shared<Memory>();
  memory->group = weak_from_this();
  try {
    memory->own = arena_->allocate(std::max<size_t>(bytes, 1));
  } catch (const std::system_error& error) {
    abort(describe(error));  // or the peers would wait for this rank
    const Lock lock(mutex_);
    check_failed_locked();
  }
  memory->peers.resize(size());
  char* data = memory->own->data();
  return tensor_over(data, std::move(memory), numel, dtype);
}

std::shared_ptr<HostGroup> HostGroup::of(const at::Tensor& tensor) {
  const auto memory = owner_of<Memory>(tensor);
  return memory ? memory->group.lock() : nullptr;
}

int64_t HostGroup::offset_of(const at::Tensor& tensor) const {
  const auto memory = owner_of<Memory>(tensor);
  TORCH_CHECK(memory, "Expected a tensor in memory that ranks of this host share.");
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  return memory->own->offset() + (data - memory->own->data());
}

// Returns where a slice of a peer's memory, at `offset` and like all of `memory`, is in this
// process. It is always the same slice for the same mapping.
char* HostGroup::map(
    Memory& memory, int rank, Mapping mapping, int64_t offset, const Slice& slice) const {
  if (rank == rank_ || slice.bytes == 0) {
    return memory.own->data() + slice.begin;
  }
  Memory::Mapped& mapped = memory.peers[rank][mapping];
  if (mapped.offset != offset) {
    const size_t before = slice.begin % page_bytes();  // on the first page
    const auto begin = offset + static_cast<int64_t>(slice.begin - before);
    const int file = peers_[rank].arena.descriptor();
    mapped.window = std::make_shared<Window>(file, begin, before + slice.bytes);
    mapped.data = mapped.window->data() + before;
    mapped.offset = offset;
  }
  return mapped.data;
}

std::vector<at::Tensor> HostGroup::tensors_at(
    const std::map<int64_t, int64_t>& offsets, const at::Tensor& own) const {
  const auto memory = owner_of<Memory>(own);
  TORCH_CHECK(
      memory && memory->group.lock().get() == this,
      "Expected a tensor in memory that this group has allocated.");
  const int64_t inside = offset_of(own) - memory->own->offset();
  std::vector<at::Tensor> tensors;
  for (const auto& [number, offset] : offsets) {
    const auto found = std::find(ranks_.begin(), ranks_.end(), number);
    TORCH_CHECK(found != ranks_.end(), "Rank ", number, " is on another host.");
    const auto rank = static_cast<int>(found - ranks_.begin());
    if (rank == rank_) {
      tensors.push_back(own);
      continue;
    }
    const Slice whole{0, memory->own->bytes()};
    char* data = map(*memory, rank, kWhole, offset - inside, whole) + inside;
    tensors.push_back(
        tensor_over(data, memory->peers[rank][kWhole].window, own.numel(), own.scalar_type()));
  }
  return tensors;
}

// -------------------------------------------------------------------------------------- averaging

std::unique_ptr<PendingResult> HostGroup::average(
    const at::Tensor& tensor, c10::ScalarType wire_dtype, size_t bucket, milliseconds timeout) {
  const int64_t number = control_.packed;
  if (const auto earlier = number - static_cast<int64_t>(control_.slots.size()); earlier >= 0) {
    // The slot may be in use.
    wait([&] { return all_exceed(&Control::summed, earlier); }, timeout);
  }
  Slot& slot = control_.slot(number);
  slot = {
      offset_of(tensor), static_cast<int64_t>(tensor.nbytes()), bucket,
      static_cast<int64_t>(wire_dtype)};
  std::shared_ptr<Operation> operation(
      new Operation{owner_of<Memory>(tensor), tensor, slot, number});
  {
    const Lock lock(mutex_);
    check_failed_locked();
    operations_.push_back(operation);
  }
  advance(&Control::packed);
  progress();
  return std::make_unique<Result>(shared_from_this(), std::move(operation), timeout);
}

void HostGroup::progress_all() {
  std::vector<std::shared_ptr<HostGroup>> living;
  {
    const std::lock_guard lock(groups_mutex);
    auto& groups = all_groups();
    std::erase_if(groups, [](const auto& group) { return group.expired(); });
    for (const auto& group : groups) {
      if (auto shared = group.lock()) {
        living.push_back(std::move(shared));
      }
    }
  }
  for (const auto& group : living) {
    group->progress();
  }
}

void HostGroup::progress() {
  std::vector<std::shared_ptr<Operation>> done;  // destroyed without the lock
  std::string failure;
  {
    const Lock lock(mutex_);
    try {
      while (sum_next_locked() || copy_next_locked(done)) {
      }
    } catch (const std::system_error& error) {
      failure = describe(error);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  if (!failure.empty()) {
    abort(failure);
  }
}

bool HostGroup::sum_next_locked() {
  if (summed_ == operations_.size()) {
    return false;
  }
  const Operation& operation = *operations_[summed_];
  if (!all_exceed(&Control::packed, operation.number)) {
    return false;
  }
  const Slice own = operation.slice(rank_, size());
  std::vector<const void*> slices;
  for (int rank = 0; rank < size(); ++rank) {
    const Slot& slot = peers_[rank].control().slot(operation.number);
    TORCH_CHECK(
        slot.matches(operation.slot), "Ranks average different buckets: expected ",
        operation.slot.describe(), " as on rank ", ranks_[rank_], ", found ", slot.describe(),
        " on rank ", ranks_[rank], ". A step may have failed on some ranks only.");
    slices.push_back(map(*operation.memory, rank, kSummedHere, slot.offset, own));
    // For the copy, when the slot may have the next operation already.
    map(*operation.memory, rank, kSummedThere, slot.offset, operation.slice(rank, size()));
  }
  const auto dtype = operation.tensor.scalar_type();
  const auto numel = static_cast<int64_t>(own.bytes / c10::elementSize(dtype));
  const auto wire_dtype = static_cast<c10::ScalarType>(operation.slot.wire_dtype);
  sum(slices, operation.memory->own->data() + own.begin, numel, dtype, wire_dtype);
  ++summed_;
  advance(&Control::summed);
  return true;
}

bool HostGroup::copy_next_locked(std::vector<std::shared_ptr<Operation>>& done) {
  if (summed_ == 0) {
    return false;
  }
  Operation& operation = *operations_.front();
  if (!all_exceed(&Control::summed, operation.number)) {
    return false;
  }
  Memory& memory = *operation.memory;
  for (int rank = 0; rank < size(); ++rank) {
    if (const auto [begin, bytes] = operation.slice(rank, size()); rank != rank_) {
      copy(memory.peers[rank][kSummedThere].data, memory.own->data() + begin, bytes);
    }
  }
  // A peer that has failed may have dropped its bucket, or overwritten it, since it was summed.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (const std::string loss = find_loss(/*asks_system=*/false); !loss.empty()) {
    throw std::runtime_error(loss);
  }
  operation.is_copied = true;
  done.push_back(std::move(operations_.front()));
  operations_.pop_front();
  --summed_;
  advance(&Control::copied);
  return true;
}

bool HostGroup::all_exceed(Counter Control::* counter, int64_t number) const {
  return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
    return (peer.control().*counter).load() > number;
  });
}

void HostGroup::advance(Counter Control::* counter) {
  (control_.*counter).fetch_add(1);
  ring();
}

// This rank, too: another thread of it may sleep.
void HostGroup::ring() const {
  for (const Peer& peer : peers_) {
    peer.doorbell().ring();
  }
}

// ---------------------------------------------------------------------------------------- waiting

void HostGroup::wait(const std::function<bool()>& condition, milliseconds timeout) {
  Doorbell& doorbell = doorbell_in(arena_->first_page());
  const auto deadline = Clock::now() + timeout;
  bool asks_system = false;
  while (true) {
    const uint32_t seen = doorbell.rings;
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    // Before `progress_all`: what a peer did before it was lost counts.
    std::string loss = find_loss(asks_system);
    progress_all();
    if (condition()) {
      return;
    }
    if (loss.empty() && left <= milliseconds::zero()) {
      loss = c10::str("Timed out waiting ", timeout.count(), " ms for ", describe_late());
    }
    if (!loss.empty()) {
      abort(loss);
    }
    {
      const Lock lock(mutex_);
      check_failed_locked();
    }
    asks_system = doorbell.sleep(seen, std::min(left, liveness_interval_.load()));
  }
}

// Returns the loss of a peer, if there is one. `asks_system`: whether to look for dead processes.
std::string HostGroup::find_loss(bool asks_system) const {
  for (int rank = 0; rank < size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (rank != rank_ && (peer.control().is_closed || (asks_system && has_ended(peer.process)))) {
      const std::string why(peer.control().failure.data());
      return c10::str(
          "Connection closed by peer: rank ", ranks_[rank], " (host memory)",
          why.empty() ? "" : ": ", why);
    }
  }
  return {};
}

std::string HostGroup::describe_late() const {
  const int64_t operations = control_.packed;
  for (const auto counter : {&Control::packed, &Control::summed, &Control::copied}) {
    std::vector<int64_t> late;
    for (int rank = 0; rank < size(); ++rank) {
      if ((peers_[rank].control().*counter).load() < operations) {
        late.push_back(ranks_[rank]);
      }
    }
    if (!late.empty()) {
      return c10::str("rank ", c10::Join(", ", late), " (host memory)");
    }
  }
  return "a peer (host memory)";
}

// Takes part in nothing more: the peers fail, too, when they wait for this rank.
void HostGroup::abort(const std::string& why) {
  std::deque<std::shared_ptr<Operation>> operations;  // destroyed without the lock
  {
    const Lock lock(mutex_);
    if (failure_.empty()) {
      failure_ = why;
      why.copy(control_.failure.data(), control_.failure.size() - 1);
    }
    operations.swap(operations_);
    summed_ = 0;
  }
  control_.is_closed = 1;
  ring();
}

std::string HostGroup::describe(const std::system_error& error) const {
  return c10::str(
      "[Rank ", ranks_[rank_],
      "] Cannot share memory with the other ranks of this host: ", error.what(),
      ". Raise the limit, or wrap with DistributedDataParallel(host_memory=False)");
}

void HostGroup::check_failed_locked() const {
  if (!failure_.empty()) {
    throw std::runtime_error(failure_);
  }
}

}  // namespace commhooks
