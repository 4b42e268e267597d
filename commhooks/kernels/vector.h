// Vector accesses of 16 bytes where the alignment allows them.
#pragma once

#include "element.h"

namespace commhooks::kernels {

using i64 = long long;

// The elements that one access moves: 16 bytes, unless `count` has to match vectors of another
// type.
template <typename T, int count = 16 / sizeof(T)>
struct alignas(count * sizeof(T)) Vector {
  static constexpr int size = count;
  T items[size];
};

// Whether one access can move the vector at `at`: it ends before `numel` and the memory is aligned.
template <typename T, int count = 16 / sizeof(T)>
__device__ inline bool is_whole(const T* base, i64 at, i64 numel) {
  return at + count <= numel && (unsigned long long)(base + at) % sizeof(Vector<T, count>) == 0;
}

// Loads the elements from `at` on; elements from `numel` on are zero.
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

// Stores the elements from `at` on; elements from `numel` on are not written.
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

// Loads as many elements as a vector of T has and converts them to T.
template <typename T, typename From>
__device__ inline Vector<T> load_as(const From* base, i64 at, i64 numel) {
  const auto found = load<From, Vector<T>::size>(base, at, numel);
  Vector<T> vector;
  for (int i = 0; i < Vector<T>::size; ++i) {
    vector.items[i] = widen(found.items[i]);
  }
  return vector;
}

// Converts the elements to the type of `base` and stores them.
template <typename T, typename To>
__device__ inline void store_as(To* base, i64 at, i64 numel, const Vector<T>& vector) {
  Vector<To, Vector<T>::size> narrowed;
  for (int i = 0; i < Vector<T>::size; ++i) {
    narrow(vector.items[i], &narrowed.items[i]);
  }
  store(base, at, numel, narrowed);
}

// Calls `body(at)` for each vector of `numel` elements, distributed over all threads of the launch.
template <typename T, typename Body>
__device__ inline void for_each_vector(i64 numel, const Body& body) {
  constexpr int size = Vector<T>::size;
  const i64 stride = (i64)gridDim.x * blockDim.x * size;
  for (i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * size; at < numel; at += stride) {
    body(at);
  }
}

}  // namespace commhooks::kernels
