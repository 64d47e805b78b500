// The driver as far as threads notice it: it may keep all that call it, as it does while a thread loads code and waits
// for a kernel to end.
#pragma once

#include <atomic>

namespace recorder {

struct Driver {
  std::atomic<bool> busy{false};
  std::atomic<int> kept{0};      // threads
  std::atomic<bool> ends{true};  // what is asked of events
  std::atomic<int> aborted{0};   // communicators
  bool full = false;             // no memory is left for windows

  void enter() {
    if (!busy) return;
    ++kept;
    busy.wait(true);
    --kept;
  }
  void leave() {
    busy = false;
    busy.notify_all();
  }
};

inline Driver& driver() {
  static Driver one;
  return one;
}

}  // namespace recorder
