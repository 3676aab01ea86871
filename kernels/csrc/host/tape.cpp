// Plays a recorded tape: one kernel after the other, without Python. Knows no kernel.

#include <cstdint>

#include "numeric.h"

// tape: `calls` times an address of a kernel that takes words, the number of its words, the words.
TREADLE_EXPORT void treadle_play(const int64_t* tape, int64_t calls) {
  for (int64_t call = 0; call < calls; ++call) {
    reinterpret_cast<void (*)(const int64_t*)>(tape[0])(tape + 2);
    tape += 2 + tape[1];
  }
}
