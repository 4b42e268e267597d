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
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#endif

namespace commhooks {
namespace {

using std::chrono::milliseconds;

// Where the threads of a process sleep, in the first page of its arena.
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
#ifndef __linux__
  static constexpr int FUTEX_WAKE = 0, FUTEX_WAIT = 0;  // there is no arena either
#endif
  int64_t futex(int operation, uint32_t value, const timespec* limit) {
#ifdef __linux__
    return syscall(SYS_futex, &rings, operation, value, limit, nullptr, 0);
#else
    return -1;
#endif
  }
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

Doorbell& doorbell_in(char* first_page) {
  return *reinterpret_cast<Doorbell*>(first_page);
}

// A descriptor of the process with this id, which becomes readable when the process ends.
File watch_process(int64_t process) {
#ifdef SYS_pidfd_open
  const auto descriptor = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
#else
  const int descriptor = -1;
  errno = ENOSYS;
#endif
  if (descriptor < 0) {
    throw std::system_error(errno, std::generic_category(), "pidfd_open");
  }
  return File(descriptor);
}

File open_file_of(int64_t process, int64_t file) {
  const std::string path = c10::str("/proc/", process, "/fd/", file);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) {
    throw std::system_error(errno, std::generic_category(), path);
  }
  return File(descriptor);
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

std::vector<std::shared_ptr<HostGroup>> living_groups() {
  std::vector<std::shared_ptr<HostGroup>> living;
  const std::lock_guard lock(groups_mutex);
  auto& groups = all_groups();
  std::erase_if(groups, [](const auto& group) { return group.expired(); });
  for (const auto& group : groups) {
    if (auto shared = group.lock()) {
      living.push_back(std::move(shared));
    }
  }
  return living;
}

}  // namespace

// -------------------------------------------------------------------------------- shared by ranks

// The input of an operation: memory of the rank's arena.
struct HostGroup::Place {
  int64_t offset;
  int64_t bytes;
  uint64_t bucket;
  int32_t dtype;
  int32_t in_place;

  // Whether ranks with these inputs average the same bucket.
  bool matches(const Place& other) const {
    return bytes == other.bytes && bucket == other.bucket && dtype == other.dtype &&
        in_place == other.in_place;
  }
  std::string describe() const {
    return c10::str(
        "bucket ", bucket, " (", bytes, " bytes of ", static_cast<c10::ScalarType>(dtype),
        in_place ? ", gradients are views)" : ")");
  }
};

struct HostGroup::Control {
  uint64_t nonce = 0;
  alignas(64) Counter packed{0};
  alignas(64) Counter summed{0};
  alignas(64) Counter copied{0};
  alignas(64) Counter read{0};
  std::atomic<uint32_t> is_closed{0};  // the rank takes part in nothing more
  std::array<Place, 256> places = {};  // of the last operations, by number modulo the size

  Place& place(int64_t number) {
    return places[static_cast<size_t>(number) % places.size()];
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

// Memory of a bucket, and what of the peers' is mapped for it.
struct HostGroup::Memory {
  Memory(
      std::weak_ptr<HostGroup> of,
      std::unique_ptr<Arena::Piece> owned,
      int rank,
      int size,
      bool in_place)
      : group(std::move(of)),
        piece(std::move(owned)),
        in_place(in_place),
        slice_bytes(round_up_to_pages((piece->bytes() + size - 1) / size)),
        average(piece->bytes()),
        offsets(size, -1),
        inputs(size) {
    const auto [begin, bytes] = slice(rank);
    if (bytes > 0) {
      average.map(begin, piece->file(), piece->offset() + begin, bytes);
    }
  }

  struct Slice {
    size_t begin;
    size_t bytes;  // whole pages
  };
  Slice slice(int rank) const {
    const size_t begin = std::min(rank * slice_bytes, piece->bytes());
    return {begin, std::min(slice_bytes, piece->bytes() - begin)};
  }

  const std::weak_ptr<HostGroup> group;
  const std::unique_ptr<Arena::Piece> piece;
  const bool in_place;
  const size_t slice_bytes;
  Window average;                             // slice r of each rank r
  std::vector<int64_t> offsets;               // of what is mapped now, by rank; -1: nothing
  std::vector<std::optional<Window>> inputs;  // the slice of this rank in the memory of each peer
};

struct HostGroup::Operation {
  Operation(std::shared_ptr<HostGroup> group, std::shared_ptr<Memory> memory, const Place& place)
      : group(std::move(group)), memory(std::move(memory)), place(place) {}
  ~Operation() {
    group->advance(&Control::read);
  }

  bool is_complete() const {
    return is_ready && (!memory->in_place || group->all_exceed(&Control::copied, number));
  }
  char* data() const {
    return memory->piece->data();
  }
  c10::ScalarType dtype() const {
    return static_cast<c10::ScalarType>(place.dtype);
  }
  // The slice of a rank without what is left of its last page.
  Memory::Slice slice(int rank) const {
    const auto [begin, bytes] = memory->slice(rank);
    const auto end = std::min(begin + bytes, static_cast<size_t>(place.bytes));
    return {begin, end - std::min(begin, end)};
  }

  const std::shared_ptr<HostGroup> group;
  const std::shared_ptr<Memory> memory;
  const Place place;
  int64_t number = 0;
  std::atomic<bool> is_ready{false};  // all ranks have summed, and this one has copied
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
  Result(std::shared_ptr<Operation> operation, at::Tensor tensor, milliseconds timeout)
      : operation_(std::move(operation)), tensor_(std::move(tensor)), timeout_(timeout) {}

  bool is_complete() override {
    note_completion();
    return completed_.has_value();
  }

  void wait() noexcept override {
    try {
      operation_->group->wait([&] { return operation_->is_complete(); }, timeout_);
      note_completion();
    } catch (...) {
      error_ = std::current_exception();
      completed_ = Clock::now();
    }
  }

  Clock::time_point completed() const override {
    return completed_.value_or(Clock::time_point());
  }

  at::Tensor result() override {
    if (error_) {
      std::rethrow_exception(error_);
    }
    if (operation_->memory->in_place) {
      return tensor_;
    }
    return tensor_over(
        operation_->memory->average.data(), operation_, tensor_.numel(), tensor_.scalar_type());
  }

 private:
  void note_completion() {
    if (!completed_ && operation_->is_complete()) {
      completed_ = Clock::now();
    }
  }

  std::shared_ptr<Operation> operation_;
  at::Tensor tensor_;  // the input
  milliseconds timeout_;
  std::optional<Clock::time_point> completed_;
  std::exception_ptr error_;
};

// ------------------------------------------------------------------------------------ connecting

HostGroup::HostGroup()
    : arena_(Arena::of_process()),
      control_piece_(arena_->allocate(sizeof(Control))),
      control_(*new (control_piece_->data()) Control) {
  control_.nonce = random_number();
}

std::shared_ptr<HostGroup> HostGroup::create() {
  std::shared_ptr<HostGroup> group(new HostGroup);
  const std::lock_guard lock(groups_mutex);
  all_groups().push_back(group);
  return group;
}

HostGroup::~HostGroup() {
  control_piece_->keep();  // peers may still look at it
  for (const auto& memory : unread_) {
    memory->piece->keep();
  }
  if (arena_->is_of_this_process()) {
    control_.is_closed = 1;
    ring();
  }
}

HostGroup::Card HostGroup::card() const {
  return {getpid(), arena_->file(), control_piece_->offset(), control_.nonce};
}

void HostGroup::connect(const std::map<int64_t, Card>& cards) {
  for (const auto& [rank, card] : cards) {
    File arena = open_file_of(card.process, card.file);
    Window first_page(arena.descriptor(), 0, page_bytes());
    Window control(arena.descriptor(), card.offset, control_piece_->bytes());
    if (card.nonce == control_.nonce) {
      rank_ = static_cast<int>(peers_.size());
    }
    ranks_.push_back(rank);
    peers_.push_back(
        {std::move(arena), watch_process(card.process), std::move(first_page), std::move(control)});
    // Another process may have got this id in another namespace of processes.
    TORCH_CHECK(
        peers_.back().control().nonce == card.nonce, "Process ", card.process, " is not rank ",
        rank, ", which published its memory.");
  }
}

// -------------------------------------------------------------------------------------- averaging

at::Tensor HostGroup::allocate(int64_t numel, c10::ScalarType dtype, bool in_place) {
  const size_t bytes = numel * c10::elementSize(dtype);
  auto memory = std::make_shared<Memory>(
      weak_from_this(), arena_->allocate(std::max<size_t>(bytes, 1)), rank_, size(), in_place);
  char* data = memory->piece->data();
  return tensor_over(data, std::move(memory), numel, dtype);
}

std::shared_ptr<HostGroup> HostGroup::of(const at::Tensor& tensor) {
  const auto memory = owner_of<Memory>(tensor);
  return memory ? memory->group.lock() : nullptr;
}

int64_t HostGroup::offset_of(const at::Tensor& tensor) const {
  const auto memory = owner_of<Memory>(tensor);
  TORCH_CHECK(memory, "Expected a tensor in memory that ranks of this host share.");
  const Arena::Piece& piece = *memory->piece;
  return piece.offset() + (static_cast<const char*>(tensor.const_data_ptr()) - piece.data());
}

at::Tensor HostGroup::tensor_at(int64_t index, int64_t offset, const at::Tensor& like) const {
  const auto page = static_cast<int64_t>(page_bytes());
  const int64_t begin = offset / page * page;
  const size_t bytes = round_up_to_pages(offset - begin + std::max<size_t>(like.nbytes(), 1));
  auto window = std::make_shared<Window>(peers_.at(index).arena.descriptor(), begin, bytes);
  char* data = window->data() + (offset - begin);
  return tensor_over(data, std::move(window), like.numel(), like.scalar_type());
}

std::unique_ptr<PendingResult> HostGroup::average(
    const at::Tensor& tensor, size_t bucket, milliseconds timeout) {
  auto memory = owner_of<Memory>(tensor);
  TORCH_INTERNAL_ASSERT(memory, "The memory of a tensor is not that of allocate().");
  const int64_t number = control_.packed;
  if (const auto earlier = number - static_cast<int64_t>(control_.places.size()); earlier >= 0) {
    // The place may be in use.
    wait([&] { return all_exceed(&Control::summed, earlier); }, timeout);
  }
  Place& place = control_.place(number);
  place = {
      memory->piece->offset(), static_cast<int64_t>(tensor.nbytes()), bucket,
      static_cast<int32_t>(tensor.scalar_type()), memory->in_place};
  auto operation = std::make_shared<Operation>(shared_from_this(), std::move(memory), place);
  {
    const Lock lock(mutex_);
    check_failed_locked();
    operation->number = number;
    operations_.push_back(operation);
    unread_.push_back(operation->memory);
  }
  advance(&Control::packed);
  progress();
  return std::make_unique<Result>(std::move(operation), tensor, timeout);
}

void HostGroup::end_step(milliseconds timeout) {
  const int64_t last = control_.packed - 1;
  wait([&] { return all_exceed(&Control::read, last); }, timeout);
  Lock lock(mutex_);
  lock.replace(unread_, {});
}

void HostGroup::progress_all() {
  for (const auto& group : living_groups()) {
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
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  if (!failure.empty()) {
    fail(failure);
  }
}

bool HostGroup::sum_next_locked() {
  if (summed_ == operations_.size()) {
    return false;
  }
  Operation& operation = *operations_[summed_];
  if (!all_exceed(&Control::packed, operation.number)) {
    return false;
  }
  map_peers(operation);
  const auto [begin, bytes] = operation.slice(rank_);
  if (bytes > 0) {
    std::vector<const void*> inputs;
    for (int rank = 0; rank < size(); ++rank) {
      inputs.push_back(
          rank == rank_ ? operation.data() + begin : operation.memory->inputs[rank]->data());
    }
    const auto numel = static_cast<int64_t>(bytes / c10::elementSize(operation.dtype()));
    sum(inputs, operation.data() + begin, numel, operation.dtype());
  }
  ++summed_;
  advance(&Control::summed);
  return true;
}

// Maps what the peers average in this operation, as far as another piece is mapped now.
void HostGroup::map_peers(Operation& operation) {
  Memory& memory = *operation.memory;
  const auto own = memory.slice(rank_);
  for (int rank = 0; rank < size(); ++rank) {
    const Peer& peer = peers_[rank];
    const Place& place = peer.control().place(operation.number);
    TORCH_CHECK(
        place.matches(operation.place), "Ranks average different buckets: expected ",
        operation.place.describe(), " as on rank ", ranks_[rank_], ", found ", place.describe(),
        " on rank ", ranks_[rank], ". A step may have failed on some ranks only.");
    if (rank == rank_ || memory.offsets[rank] == place.offset) {
      continue;
    }
    const int file = peer.arena.descriptor();
    if (const auto [begin, bytes] = memory.slice(rank); bytes > 0) {
      memory.average.map(begin, file, place.offset + static_cast<int64_t>(begin), bytes);
    }
    if (own.bytes > 0) {
      memory.inputs[rank].emplace(file, place.offset + static_cast<int64_t>(own.begin), own.bytes);
    }
    memory.offsets[rank] = place.offset;
  }
}

bool HostGroup::copy_next_locked(std::vector<std::shared_ptr<Operation>>& done) {
  if (summed_ == 0) {
    return false;
  }
  Operation& operation = *operations_.front();
  if (!all_exceed(&Control::summed, operation.number)) {
    return false;
  }
  if (operation.memory->in_place) {
    for (int rank = 0; rank < size(); ++rank) {
      if (const auto [begin, bytes] = operation.slice(rank); rank != rank_) {
        copy(operation.memory->average.data() + begin, operation.data() + begin, bytes);
      }
    }
  }
  operation.is_ready = true;
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
  bool looks_around = false;
  while (true) {
    const uint32_t seen = doorbell.rings;
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    // Before `progress_all`: what a peer did before it was lost counts.
    std::string loss = find_loss(looks_around);
    progress_all();
    if (condition()) {
      return;
    }
    if (loss.empty() && left <= milliseconds::zero()) {
      loss = c10::str("Timed out waiting ", timeout.count(), " ms for ", describe_late());
    }
    if (!loss.empty()) {
      fail(loss);
    }
    {
      const Lock lock(mutex_);
      check_failed_locked();
    }
    looks_around = doorbell.sleep(seen, std::min(left, look_around_.load()));
  }
}

// Returns the loss of a peer, if there is one. `looks_around`: whether to ask for dead processes.
std::string HostGroup::find_loss(bool looks_around) const {
  for (int rank = 0; rank < size(); ++rank) {
    const Peer& peer = peers_[rank];
    if (rank != rank_ && (peer.control().is_closed || (looks_around && has_ended(peer.process)))) {
      return c10::str("Connection closed by peer: rank ", ranks_[rank], " (host memory)");
    }
  }
  return {};
}

std::string HostGroup::describe_late() const {
  const int64_t operations = control_.packed;
  for (const auto counter :
       {&Control::packed, &Control::summed, &Control::copied, &Control::read}) {
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
void HostGroup::fail(const std::string& why) {
  std::deque<std::shared_ptr<Operation>> operations;  // destroyed without the lock
  {
    const Lock lock(mutex_);
    if (failure_.empty()) {
      failure_ = why;
    }
    operations.swap(operations_);
    summed_ = 0;
  }
  control_.is_closed = 1;
  ring();
}

void HostGroup::check_failed_locked() const {
  if (!failure_.empty()) {
    throw std::runtime_error(failure_);
  }
}

}  // namespace commhooks
