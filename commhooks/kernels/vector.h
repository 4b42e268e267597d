// Accesses of 16 bytes, wherever memory allows them.
#pragma once

#include "element.h"

namespace commhooks::kernels {

using i64 = long long;

// As many elements as one access moves: of 16 bytes, unless it is to match vectors of another type.
template <typename T, int count = 16 / sizeof(T)>
struct alignas(count * sizeof(T)) Vector {
  static constexpr int size = count;
  T items[size];
};

// Whether the vector at `at` is one access: not where it runs over the end, nor in misaligned memory.
template <typename T, int count = 16 / sizeof(T)>
__device__ inline bool is_whole(const T* base, i64 at, i64 numel) {
  return at + count <= numel && (unsigned long long)(base + at) % sizeof(Vector<T, count>) == 0;
}

// Elements `at` and following of `numel`; zeros behind the end.
template <typename T, int count = 16 / sizeof(T)>
__device__ inline Vector<T, count> load(const T* base, i64 at, i64 numel) {
  if (is_whole<T, count>(base, at, numel)) {
    return *(const Vector<T, count>*)(base + at);
  }
  Vector<T, count> vector = {};
  for (int i = 0; i < count; ++i) {
    if (at + i < numel) {
      vector.items[i] = base[at + i];
    }
  }
  return vector;
}

template <typename T, int count>
__device__ inline void store(T* base, i64 at, i64 numel, const Vector<T, count>& vector) {
  if (is_whole<T, count>(base, at, numel)) {
    *(Vector<T, count>*)(base + at) = vector;
    return;
  }
  for (int i = 0; i < count; ++i) {
    if (at + i < numel) {
      base[at + i] = vector.items[i];
    }
  }
}

// As `load`, of elements in another precision; as many as a vector of T has.
template <typename T, typename From>
__device__ inline Vector<T> load_as(const From* base, i64 at, i64 numel) {
  const auto found = load<From, Vector<T>::size>(base, at, numel);
  Vector<T> vector;
  for (int i = 0; i < Vector<T>::size; ++i) {
    vector.items[i] = widen(found.items[i]);
  }
  return vector;
}

template <typename T, typename To>
__device__ inline void store_as(To* base, i64 at, i64 numel, const Vector<T>& vector) {
  Vector<To, Vector<T>::size> narrowed;
  for (int i = 0; i < Vector<T>::size; ++i) {
    narrow(vector.items[i], &narrowed.items[i]);
  }
  store(base, at, numel, narrowed);
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
