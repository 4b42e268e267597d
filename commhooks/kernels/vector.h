// Accesses of 16 bytes, wherever memory allows them.
#pragma once

namespace commhooks::kernels {

using i64 = long long;

// As many elements as one access moves.
template <typename T>
struct alignas(16) Vector {
  static constexpr int size = 16 / sizeof(T);
  T items[size];
};

// Whether the vector at `at` is one access: not where it runs over the end, nor in misaligned memory.
template <typename T>
__device__ inline bool is_whole(const T* base, i64 at, i64 numel) {
  return at + Vector<T>::size <= numel && (unsigned long long)(base + at) % 16 == 0;
}

// Elements `at` and following of `numel`; zeros behind the end.
template <typename T>
__device__ inline Vector<T> load(const T* base, i64 at, i64 numel) {
  if (is_whole(base, at, numel)) {
    return *(const Vector<T>*)(base + at);
  }
  Vector<T> vector = {};
  for (int i = 0; i < Vector<T>::size; ++i) {
    if (at + i < numel) {
      vector.items[i] = base[at + i];
    }
  }
  return vector;
}

template <typename T>
__device__ inline void store(T* base, i64 at, i64 numel, const Vector<T>& vector) {
  if (is_whole(base, at, numel)) {
    *(Vector<T>*)(base + at) = vector;
    return;
  }
  for (int i = 0; i < Vector<T>::size; ++i) {
    if (at + i < numel) {
      base[at + i] = vector.items[i];
    }
  }
}

// Calls `body(at)` for every vector of `numel` elements, spread over all threads of the launch.
template <typename T, typename Body>
__device__ inline void for_each_vector(i64 numel, const Body& body) {
  constexpr int size = Vector<T>::size;
  const i64 stride = (i64)gridDim.x * blockDim.x * size;
  for (i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * size; at < numel; at += stride) {
    body(at);
  }
}

}  // namespace commhooks::kernels
