// Memory that other processes of the same host can map.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace commhooks {

// Throws std::system_error: what failed, why, and the limit of this process that may be the reason.
[[noreturn]] void throw_system_error(const std::string& what, int error = errno);

// Owns a file descriptor.
class File {
 public:
  // `descriptor`: the result of the system call `what`. Throws std::system_error if that failed.
  File(int descriptor, const std::string& what);
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~File();

  int descriptor() const {
    return descriptor_;
  }

 private:
  int descriptor_;
};

// A part of a file in the memory of this process.
class Window {
 public:
  // Throws std::system_error. The offset is that of a page.
  Window(int file, int64_t offset, size_t bytes);
  Window(Window&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Window& operator=(Window&&) = delete;
  ~Window();

  char* data() const {
    return static_cast<char*>(data_);
  }

 private:
  void* data_;
  size_t bytes_;
};

size_t page_bytes();

// Throws std::system_error if this process cannot map so many bytes more.
void check_address_space(size_t bytes);

// The memory that this process shares: one anonymous file, which is gone with the last process that
// has it open or mapped. An offset that is given out again names memory of the same size, so what a
// peer has mapped there stays valid.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // Throws std::system_error if the system has no such files. A forked process gets an arena of its
  // own.
  static std::shared_ptr<Arena> of_process();

  // Memory that is given back to the system on destruction, other than in a forked process.
  class Allocation {
   public:
    Allocation(std::shared_ptr<Arena> arena, int64_t offset, size_t bytes);
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;
    ~Allocation();

    // Does not give the memory back before the process ends.
    void keep() {
      is_kept_ = true;
    }

    int file() const {
      return arena_->file();
    }
    int64_t offset() const {
      return offset_;
    }
    size_t bytes() const {
      return bytes_;
    }
    char* data() const {
      return window_.data();
    }

   private:
    std::shared_ptr<Arena> arena_;
    int64_t offset_;
    size_t bytes_;
    Window window_;
    bool is_kept_ = false;
  };

  // Returns at least this many bytes. Throws std::system_error if memory is exhausted, or a limit.
  std::unique_ptr<Allocation> allocate(size_t bytes);

  // Throws std::system_error if the file may not grow by so many bytes.
  void check_room(size_t bytes);

  // The first page is not given out.
  char* first_page() const {
    return first_page_.data();
  }
  int file() const {
    return file_.descriptor();
  }
  bool is_of_this_process() const;

 private:
  explicit Arena(File file);
  int64_t take_offset(size_t bytes);
  void give_offset(int64_t offset, size_t bytes);
  void give_back(int64_t offset, size_t bytes);  // and the memory there, to the system

  int process_;
  File file_;
  Window first_page_;
  std::mutex mutex_;  // guards what follows; never held while the system finds or frees memory
  int64_t end_;
  std::multimap<size_t, int64_t> free_;  // offsets by size
};

}  // namespace commhooks
