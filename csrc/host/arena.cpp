#include "host/arena.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace commhooks {
namespace {

// Returns the limit of this process that `error` may come from, for messages.
std::string describe_limit(int error) {
  const auto describe = [](const char* name, const char* unit, auto resource) {
    rlimit limit{};
    getrlimit(resource, &limit);
    return limit.rlim_cur == RLIM_INFINITY ? ""
                                           : c10::str(" (", name, ": ", limit.rlim_cur, unit, ")");
  };
  switch (error) {
    case EFBIG:
      return describe("ulimit -f", " bytes", RLIMIT_FSIZE);
    case EMFILE:
      return describe("ulimit -n", "", RLIMIT_NOFILE);
    case ENOMEM:
      return describe("ulimit -v", " bytes", RLIMIT_AS);
    default:
      return "";
  }
}

// To exceed the limit would also send SIGXFSZ, which ends a process unless it is ignored.
void check_file_size(int64_t bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  if (limit.rlim_cur < static_cast<rlim_t>(bytes)) {
    throw_system_error(c10::str("a file of ", bytes, " bytes"), EFBIG);
  }
}

// Reserves the memory: without it a write would end the process if memory is exhausted. In pieces,
// because older kernels undo the call if any signal arrives: a timer could do so each time.
void extend(int file, int64_t offset, size_t bytes) {
  constexpr int64_t kPieceBytes = 16 << 20;
  const int64_t end = offset + static_cast<int64_t>(bytes);
  if (end > lseek(file, 0, SEEK_END)) {
    check_file_size(end);
  }
  for (int64_t begin = offset; begin < end; begin += kPieceBytes) {
    int error = EINTR;
    while (error == EINTR) {
      error = posix_fallocate(file, begin, std::min(kPieceBytes, end - begin));
    }
    if (error != 0) {
      fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, begin - offset);
      throw_system_error(c10::str("posix_fallocate of ", bytes, " bytes"), error);
    }
  }
}

}  // namespace

void throw_system_error(const std::string& what, int error) {
  throw std::system_error(error, std::generic_category(), what + describe_limit(error));
}

File::File(int descriptor, const std::string& what) : descriptor_(descriptor) {
  if (descriptor < 0) {
    throw_system_error(what);
  }
}

File::~File() {
  if (descriptor_ >= 0) {
    close(descriptor_);
  }
}

Window::Window(int file, int64_t offset, size_t bytes) : bytes_(bytes) {
  constexpr int kFlags = MAP_SHARED | MAP_POPULATE;
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, file, offset);
  if (data_ == MAP_FAILED) {
    throw_system_error(c10::str("mmap of ", bytes, " bytes"));
  }
}

Window::~Window() {
  if (data_) {
    munmap(data_, bytes_);
  }
}

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void check_address_space(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw_system_error(c10::str("mmap of ", bytes, " bytes"));
  }
  munmap(data, bytes);
}

Arena::Arena(File file)
    : process_(getpid()),
      file_(std::move(file)),
      first_page_(
          (extend(file_.descriptor(), 0, page_bytes()), file_.descriptor()), 0, page_bytes()),
      end_(static_cast<int64_t>(page_bytes())) {}

std::shared_ptr<Arena> Arena::of_process() {
  static std::mutex mutex;
  static std::shared_ptr<Arena> arena;
  const std::lock_guard lock(mutex);
  if (!arena || !arena->is_of_this_process()) {
    arena = std::shared_ptr<Arena>(
        new Arena(File(memfd_create("commhooks", MFD_CLOEXEC), "memfd_create")));
  }
  return arena;
}

bool Arena::is_of_this_process() const {
  return process_ == getpid();
}

std::unique_ptr<Arena::Allocation> Arena::allocate(size_t bytes) {
  bytes = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  const int64_t offset = take_offset(bytes);
  try {
    extend(file(), offset, bytes);
    return std::make_unique<Allocation>(shared_from_this(), offset, bytes);
  } catch (...) {
    give_back(offset, bytes);
    throw;
  }
}

int64_t Arena::take_offset(size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (const auto free = free_.extract(bytes)) {
    return free.mapped();
  }
  return std::exchange(end_, end_ + static_cast<int64_t>(bytes));
}

void Arena::give_offset(int64_t offset, size_t bytes) {
  const std::lock_guard lock(mutex_);
  free_.emplace(bytes, offset);
}

void Arena::check_room(size_t bytes) {
  const std::lock_guard lock(mutex_);
  check_file_size(end_ + static_cast<int64_t>(bytes));
}

void Arena::give_back(int64_t offset, size_t bytes) {
  fallocate(file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes));
  give_offset(offset, bytes);
}

Arena::Allocation::Allocation(std::shared_ptr<Arena> arena, int64_t offset, size_t bytes)
    : arena_(std::move(arena)), offset_(offset), bytes_(bytes), window_(file(), offset, bytes) {}

Arena::Allocation::~Allocation() {
  if (!is_kept_ && arena_->is_of_this_process()) {
    arena_->give_back(offset_, bytes_);
  }
}

}  // namespace commhooks
