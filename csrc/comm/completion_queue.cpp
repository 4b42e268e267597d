#include "comm/completion_queue.h"

#include <ATen/core/ivalue_inl.h>

namespace commhooks {

// Callbacks share it, and may outlive the queue.
struct CompletionQueue::Tokens {
  std::mutex mutex;
  std::condition_variable arrived;
  std::deque<int64_t> tokens;

  void put(int64_t token) {
    {
      const Lock lock(mutex);
      tokens.push_back(token);
    }
    arrived.notify_one();
  }
};

struct CompletionQueue::Waiter {
  struct Item {
    c10::intrusive_ptr<c10d::Work> work;
    int64_t token;
  };

  // The state is shared with the thread, which is detached: a Work that never completes must not
  // block the destruction of the queue.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Item> items;
    bool closed = false;
  };

  explicit Waiter(const std::shared_ptr<Tokens>& tokens) : state(std::make_shared<State>()) {
    std::thread([state = state, tokens] {
      while (true) {
        Item item;
        {
          Lock lock(state->mutex);
          lock.wait(state->changed, [&] { return state->closed || !state->items.empty(); });
          if (state->closed) {
            return;
          }
          item = std::move(state->items.front());
          state->items.pop_front();
        }
        try {
          item.work->wait();
        } catch (const std::exception&) {
          // The reader of the token gets the error from the Work.
        }
        tokens->put(item.token);
      }
    }).detach();
  }

  ~Waiter() {
    {
      const Lock lock(state->mutex);
      state->closed = true;
    }
    state->changed.notify_one();
  }

  void add(Item item) {
    {
      const Lock lock(state->mutex);
      state->items.push_back(std::move(item));
    }
    state->changed.notify_one();
  }

  // Leaves the item that `other` waits for.
  void take_items_of(Waiter& other) {
    std::deque<Item> items;
    {
      const Lock lock(other.state->mutex);
      items.swap(other.state->items);
    }
    for (Item& item : items) {
      add(std::move(item));
    }
  }

  std::shared_ptr<State> state;
};

CompletionQueue::CompletionQueue() : tokens_(std::make_shared<Tokens>()) {}

CompletionQueue::~CompletionQueue() = default;

void CompletionQueue::put(int64_t token) {
  tokens_->put(token);
}

void CompletionQueue::watch(
    const c10::intrusive_ptr<c10d::Work>& work, int64_t token, int64_t stage) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work->getFuture();
  } catch (const c10::Error&) {
    // This Work has no future; see below.
  }
  if (future) {
    future->addCallback(
        [tokens = tokens_, token](c10::ivalue::Future&) { tokens->put(token); },
        /*uses_future=*/false);  // so that no stream waits for it
    return;
  }
  const Lock lock(waiters_mutex_);
  std::unique_ptr<Waiter>& waiter = waiters_[stage];
  if (!waiter) {
    waiter = std::make_unique<Waiter>(tokens_);
  }
  waiter->add({work, token});
}

void CompletionQueue::forget() {
  const Lock lock(waiters_mutex_);
  for (auto& [stage, waiter] : waiters_) {
    auto next = std::make_unique<Waiter>(tokens_);
    next->take_items_of(*waiter);
    waiter = std::move(next);
  }
}

std::optional<int64_t> CompletionQueue::get(std::optional<std::chrono::duration<double>> timeout) {
  Lock lock(tokens_->mutex);
  const auto some = [&] { return !tokens_->tokens.empty(); };
  if (!timeout) {
    lock.wait(tokens_->arrived, some);
  } else if (!lock.wait_for(tokens_->arrived, *timeout, some)) {
    return std::nullopt;
  }
  const int64_t token = tokens_->tokens.front();
  tokens_->tokens.pop_front();
  return token;
}

}  // namespace commhooks
