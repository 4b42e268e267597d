#include "host/arena.h"

#include <cerrno>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace commhooks {
namespace {

[[noreturn]] void throw_error(const char* call, int error = errno) {
  throw std::system_error(error, std::generic_category(), call);
}

File anonymous_file() {
  const int descriptor = memfd_create("commhooks", MFD_CLOEXEC);
  if (descriptor < 0) {
    throw_error("memfd_create");
  }
  return File(descriptor);
}

// Reserves the memory: without it a write would end the process if memory is exhausted.
void extend(int file, int64_t offset, size_t bytes) {
  if (const int error = posix_fallocate(file, offset, static_cast<off_t>(bytes))) {
    const std::string what = "cannot share " + std::to_string(bytes) +
        " bytes with the other ranks of this host (posix_fallocate); free memory, or pass "
        "host_memory=False";
    throw_error(what.c_str(), error);
  }
}

}  // namespace

File::~File() {
  if (descriptor_ >= 0) {
    close(descriptor_);
  }
}

Window::Window(int file, int64_t offset, size_t bytes) : bytes_(bytes) {
  constexpr int kFlags = MAP_SHARED | MAP_POPULATE;
  data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, file, offset);
  if (data_ == MAP_FAILED) {
    throw_error("mmap");
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
    arena = std::shared_ptr<Arena>(new Arena(anonymous_file()));
  }
  return arena;
}

bool Arena::is_of_this_process() const {
  return process_ == getpid();
}

std::unique_ptr<Arena::Allocation> Arena::allocate(size_t bytes) {
  bytes = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  const std::lock_guard lock(mutex_);
  extend(file(), end_, bytes);
  const int64_t offset = end_;
  end_ += static_cast<int64_t>(bytes);
  return std::make_unique<Allocation>(shared_from_this(), offset, bytes);
}

Arena::Allocation::Allocation(std::shared_ptr<const Arena> arena, int64_t offset, size_t bytes)
    : arena_(std::move(arena)), offset_(offset), bytes_(bytes), window_(file(), offset, bytes) {}

Arena::Allocation::~Allocation() {
  if (!is_kept_ && arena_->is_of_this_process()) {
    fallocate(
        file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_, static_cast<off_t>(bytes_));
  }
}

}  // namespace commhooks
